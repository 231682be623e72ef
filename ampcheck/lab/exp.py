"""Where exp leaves each format, and what that does to softplus and softmax written as in the textbook."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table
from ampcheck.lab.expectations import ARITHMETIC, Expectations, lacks
from ampcheck.lab.registry import check_of

CHECK = check_of("exp")

LOGITS = (0.0, 20.0, 40.0, 80.0)
RANGE = (-80.0, 80.0)
NEAR = 200
"""Numbers at each side of where exp should end."""

_SHOWN = ("float32", "tf32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")
"""In the table of edges: PyTorch computes in some of them nowhere, and their edges follow from their bits."""

_FLOOR = 2.0**-26
"""What lies closer to float64 than this is drawn here: a logarithmic axis has no zero."""


def naive_softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))` as it is written."""
    return (1 + x.exp()).log()


def naive_softmax(x: Tensor) -> Tensor:
    """`exp(x) / sum(exp(x))` as it is written, over the last dimension."""
    powers = x.exp()
    return powers / powers.sum(-1, keepdim=True)


SOFTPLUS: Mapping[str, Callable[[Tensor], Tensor]] = {"naive": naive_softplus, "stable": F.softplus}
SOFTMAX: Mapping[str, Callable[[Tensor], Tensor]] = {"naive": naive_softmax, "stable": lambda x: x.softmax(-1)}


@dataclass(frozen=True, slots=True)
class ExpEdge:
    """Where exp overflows in one format: the largest x with a finite exp by the format, and on the device."""

    format: str
    derived: float
    found: float


@dataclass(frozen=True, slots=True)
class ExpStats:
    """softplus: by format and way the relative error at each of `places`, NaN where there is no finite result.
    softmax: by format and way the probabilities of `LOGITS`. exact: the same in float64."""

    device: str
    edges: tuple[ExpEdge, ...]
    places: Mapping[str, tuple[float, ...]]
    softplus: Mapping[tuple[str, str], tuple[float, ...]]
    softmax: Mapping[tuple[str, str], tuple[float, ...]]
    exact: tuple[float, ...]
    lacking: Mapping[str, str]


def last_finite(form: FloatFormat) -> float:
    """The largest x of the format whose exp, rounded once, is finite: the last one below log(`overflows_at`)."""
    code = form.encode(math.log(form.overflows_at))
    while form.decode(code) >= math.log(form.overflows_at):
        code -= 1
    return form.decode(code)


def distinct(x: float, form: FloatFormat) -> str:
    """At least so many digits that neighbours in the format never look alike (DECIMAL_DIG of C, ISO C11 5.2.4.2.2)."""
    return f"{x:.{max(6, math.ceil(1 + (form.mantissa_bits + 1) * math.log10(2)))}g}"


def measure_exp(device: str = "cpu") -> ExpStats:
    """Look for the edge of exp near where the format says it is, and run the functions on the device."""
    edges, places, softplus, softmax, lacking = [], {}, {}, {}, {}
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    for name in ARITHMETIC:
        if why := lacks(name, device):
            lacking[name] = why
            continue
        form, dtype = format_of(name), getattr(torch, name)
        edge = last_finite(form)
        code = form.encode(edge)
        near = [form.decode(other) for other in range(code - NEAR, code + NEAR + 1)]
        finite = torch.tensor(near, dtype=dtype, device=device).exp().isfinite().tolist()
        edges.append(ExpEdge(name, edge, max((x for x, ok in zip(near, finite, strict=True) if ok), default=math.nan)))
        x = torch.linspace(*RANGE, 321, dtype=torch.float64).to(dtype)
        places[name] = tuple(x.double().tolist())
        for way, function in SOFTPLUS.items():
            softplus[name, way] = _errors(function(x.to(device)), x.double())
        for way, function in SOFTMAX.items():
            softmax[name, way] = tuple(function(logits.to(device, dtype)).cpu().double().tolist())
    exact = tuple(logits.softmax(-1).tolist())
    return ExpStats(device, tuple(edges), places, softplus, softmax, exact, lacking)


def _errors(result: Tensor, x: Tensor) -> tuple[float, ...]:
    """Relative error against float64 on the same x, NaN where the result is not finite."""
    exact = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    error = (result.cpu().double() - exact).abs() / exact
    return tuple(error.where(error.isfinite(), torch.nan).tolist())


def check_exp(stats: ExpStats) -> list[Finding]:
    """exp overflows where the format ends; the naive forms fail there, the stable ones do not."""
    lab = Expectations(CHECK, stats.device)
    for edge in stats.edges:
        form = format_of(edge.format)
        expected = (
            f"in {edge.format} exp is finite up to {distinct(edge.derived, form)}, the last value below "
            f"log({form.overflows_at:.6g}) = {distinct(math.log(form.overflows_at), form)}"
        )
        close = abs(edge.found - edge.derived) <= form.ulp(edge.derived)  # a kernel may be off by one ULP of exp
        found, last, right = f"up to {distinct(edge.found, form)}", edge.found, edge.derived
        lab.expect(expected, found, close, seen=2 * NEAR + 1, observed=last, limit=right)
    for name in stats.places:
        lab.findings += _check_functions(stats, name)
    for why in stats.lacking.values():
        lab.skip(why)
    return lab.findings


def _check_functions(stats: ExpStats, name: str) -> list[Finding]:
    form = format_of(name)
    # Below this exp(x) is less than half an ULP of 1, so that 1 + exp(x) is 1 and its logarithm 0.
    lost = math.log(form.unit_roundoff)
    naive, stable = stats.softplus[name, "naive"], stats.softplus[name, "stable"]
    gone = [x for x, error in zip(stats.places[name], naive, strict=True) if x < lost and error != 1.0]
    over = [x for x, e in zip(stats.places[name], naive, strict=True) if x > last_finite(form) and not math.isnan(e)]
    told_over = f", infinite above {last_finite(form):.5g}" if last_finite(form) < RANGE[1] else ""
    expected = f"log(1 + exp(x)) in {name} is 0 below log(unit roundoff) = {lost:.4g}{told_over}"
    found = "so it is" if not gone and not over else f"not so at {len(gone) + len(over)} places"
    lab = Expectations(CHECK, stats.device)
    lab.expect(expected, found, not gone and not over, seen=len(naive))
    # Where the result itself is subnormal or zero its relative error is no matter of the function. exp and log1p are
    # right to one ULP each, as those of SLEEF and of CUDA are documented: four unit roundoffs.
    sound = [
        error
        for x, error in zip(stats.places[name], stable, strict=True)
        if math.exp(min(x, 0.0)) >= 2 * form.smallest_normal
    ]
    worst = max((math.inf if math.isnan(error) else error for error in sound), default=math.inf)
    limit = 4 * form.unit_roundoff
    lab.expect(
        f"softplus of PyTorch in {name} is off by at most four roundings ({limit:.2g}) on {RANGE[0]:g} to "
        f"{RANGE[1]:g}, as far as its result is a normal number",
        f"at most {worst:.2g}",
        worst <= limit,
        seen=len(sound),
        warns=True,
        observed=worst,
        limit=limit,
    )
    finite = all(map(math.isfinite, stats.softmax[name, "naive"]))
    fits = max(LOGITS) <= last_finite(form)  # the sum overflows with the largest power
    expected = f"naive softmax of {_list(LOGITS)} in {name} is {'finite' if fits else 'NaN'}"
    found = "finite" if finite else f"{sum(map(math.isnan, stats.softmax[name, 'naive']))} of {len(LOGITS)} are NaN"
    lab.expect(expected, found, finite == fits, seen=len(LOGITS))
    return [*lab.findings, _check_softmax(stats, name)]


def _check_softmax(stats: ExpStats, name: str) -> Finding:
    """The stable softmax against float64.

    The differences of `LOGITS` are exact. exp is right to one ULP (two roundings), in the numerator and in the sum of n
    terms, which takes n - 1 roundings more, and the quotient one: n + 4. Below the smallest normal number a power and a
    quotient are half of the smallest subnormal off each.
    """
    form = format_of(name)
    count = len(LOGITS) + 4
    limit = count * form.unit_roundoff / (1 - count * form.unit_roundoff)
    off = [
        max(abs(found - exact) - form.smallest_subnormal, 0.0) / exact if math.isfinite(found) else math.inf
        for found, exact in zip(stats.softmax[name, "stable"], stats.exact, strict=True)
    ]
    worst = max(off, default=math.inf)
    return Expectations(CHECK, stats.device).expect(
        f"softmax of PyTorch of {_list(LOGITS)} in {name} is off by at most {count} roundings ({limit:.2g}), beyond "
        f"the smallest subnormal, {form.smallest_subnormal:.2g}",
        f"at most {worst:.2g}",
        worst <= limit,
        seen=len(off),
        warns=True,
        observed=worst,
        limit=limit,
    )


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of the edges and of softmax, a chart of the errors of softplus."""
    progress("exp, softplus and softmax", 0, 1)
    stats = measure_exp(device)
    return Run(
        findings=tuple(check_exp(stats)),
        coverage=Coverage(
            {"values of exp, softplus and softmax": sum(map(len, stats.softplus.values()))},
            dict.fromkeys(stats.lacking.values(), 1),
        ),
        tables=(_edges(stats), _softmax(stats)),
        charts=tuple(softplus_chart(stats, way) for way in SOFTPLUS),
    )


def softplus_chart(stats: ExpStats, way: str) -> Chart:
    """Relative error over x of one way, a line for each format."""
    series = [
        Series(name, stats.places[name], [max(error, _FLOOR) for error in errors])
        for (name, own), errors in stats.softplus.items()
        if own == way
    ]
    naive, least = way == "naive", format_of("float16").smallest_subnormal
    note = "1 is a result of zero. " + (
        "A line that ends has become infinite." if naive else f"float16 has no smaller number than {least:.2g} to give."
    )
    return Chart(
        "line",
        "log(1 + exp(x)), as written" if naive else "torch.nn.functional.softplus, the same function",
        "x",
        "relative error against float64",
        series=series,
        check=CHECK.slug,
        note=f"{note} Errors below {_FLOOR:.2g} are drawn there.",
        y_scale="log",
    )


def _edges(stats: ExpStats) -> Table:
    seen = {edge.format: edge.found for edge in stats.edges}
    rows: list[tuple[Scalar, ...]] = []
    for name in _SHOWN:
        form = format_of(name)
        last = seen.get(name, last_finite(form))
        beyond = form.decode(form.encode(last) + 1) if math.isfinite(last) else math.nan
        places = (math.log(form.overflows_at), last, beyond)
        rows.append(
            (name, f"{form.max:.6g}", *(distinct(x, form) for x in places), "measured" if name in seen else "its bits")
        )
    return Table(
        f"Where exp overflows on {stats.device}",
        ("format", "largest value", "log of where it ends", "last finite at x", "not finite at x", "known by"),
        rows,
        check=CHECK.slug,
        note="x and exp(x) are both numbers of the format. In tf32 and float8 PyTorch has no exp: theirs "
        "follow from their bits.",
    )


def _softmax(stats: ExpStats) -> Table:
    rows: list[tuple[Scalar, ...]] = [("float64", "stable", *(f"{p:.3g}" for p in stats.exact))]
    rows += [(name, way, *(f"{p:.3g}" for p in held)) for (name, way), held in stats.softmax.items()]
    columns = ("format", "way", *(f"of {logit:g}" for logit in LOGITS))
    note = "naive: exp(x) / sum(exp(x)); stable: torch.softmax, which takes the largest off first."
    return Table(f"softmax of {_list(LOGITS)}", columns, rows, check=CHECK.slug, note=note)


def _list(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
