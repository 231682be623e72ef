"""Where exp overflows in each format, and what that does to softplus and softmax written as in the textbook."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Finding, Run, Scalar, Series, Table
from ampcheck.tools.lab.lab import ARITHMETIC, Expectations, run_of, usable

LOGITS = (0.0, 20.0, 40.0, 80.0)
RANGE = (-80.0, 80.0)
NEAR = 200
"""Numbers tried on each side of the derived edge of exp."""

_SHOWN = ("float32", "tf32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")
"""In the table of edges: some have no arithmetic in PyTorch, and their edges follow from their bits."""

_FLOOR = 2.0**-26
"""Smaller errors are drawn here: a logarithmic axis has no zero."""

_LISTED = ", ".join(f"{logit:g}" for logit in LOGITS)

SOFTPLUS: dict[str, Callable[[Tensor], Tensor]] = {"naive": lambda x: (1 + x.exp()).log(), "stable": F.softplus}
SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "naive": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "stable": lambda x: x.softmax(-1),
}


@dataclass(frozen=True, slots=True)
class ExpStats:
    """edges: the largest x with a finite exp on the device, by format. softplus: by format and form the relative error
    at each of `inputs`, NaN where the result is not finite. softmax: by format and form the probabilities of `LOGITS`;
    exact: the same in float64."""

    device: str
    edges: Mapping[str, float]
    inputs: Mapping[str, tuple[float, ...]]
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
    """x with enough digits to tell neighbours in the format apart (DECIMAL_DIG of C, ISO C11 5.2.4.2.2)."""
    return f"{x:.{max(6, math.ceil(1 + (form.mantissa_bits + 1) * math.log10(2)))}g}"


def measure_exp(device: str = "cpu") -> ExpStats:
    """Search the edge of exp near the derived one, and run the functions on the device."""
    edges, inputs, softplus, softmax = {}, {}, {}, {}
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    dtypes, lacking = usable(ARITHMETIC, device)
    for name, dtype in dtypes.items():
        form = format_of(name)
        code = form.encode(last_finite(form))
        near = [form.decode(other) for other in range(code - NEAR, code + NEAR + 1)]
        finite = torch.tensor(near, dtype=dtype, device=device).exp().isfinite().tolist()
        edges[name] = max((x for x, ok in zip(near, finite, strict=True) if ok), default=math.nan)
        x = torch.linspace(*RANGE, 321, dtype=torch.float64).to(dtype)
        inputs[name] = tuple(x.double().tolist())
        wide = x.double()
        reference = wide.clamp(min=0) + torch.log1p(torch.exp(-wide.abs()))
        for way, function in SOFTPLUS.items():
            error = (function(x.to(device)).cpu().double() - reference).abs() / reference
            softplus[name, way] = tuple(error.where(error.isfinite(), torch.nan).tolist())
        for way, function in SOFTMAX.items():
            softmax[name, way] = tuple(function(logits.to(device, dtype)).cpu().double().tolist())
    return ExpStats(device, edges, inputs, softplus, softmax, tuple(logits.softmax(-1).tolist()), lacking)


def check_exp(stats: ExpStats) -> list[Finding]:
    """exp overflows where the format ends; the naive forms fail there, the stable ones do not."""
    lab = Expectations("exp", stats.device)
    for name, observed in stats.edges.items():
        form = format_of(name)
        edge = last_finite(form)
        expected = (
            f"in {name} exp is finite up to {distinct(edge, form)}, the last value below "
            f"log({form.overflows_at:.6g}) = {distinct(math.log(form.overflows_at), form)}"
        )
        close = abs(observed - edge) <= form.ulp(edge)  # a kernel may be off by one ULP of exp
        outcome = f"up to {distinct(observed, form)}"
        lab.expect(expected, outcome, close, seen=2 * NEAR + 1, observed=observed, limit=edge)
    for name in stats.inputs:
        _check_softplus(stats, name, lab)
        _check_softmax(stats, name, lab)
    lab.skip(*stats.lacking.values())
    return lab.findings


def _check_softplus(stats: ExpStats, name: str, lab: Expectations) -> None:
    """exp and log1p are right to one ULP each, as documented of SLEEF and CUDA: four unit roundoffs."""
    form = format_of(name)
    edge = last_finite(form)
    # Below this exp(x) is less than half an ULP of 1, so that 1 + exp(x) is 1 and its logarithm 0.
    lost = math.log(form.unit_roundoff)
    naive = list(zip(stats.inputs[name], stats.softplus[name, "naive"], strict=True))
    wrong = sum((x < lost and error != 1.0) or (x > edge and not math.isnan(error)) for x, error in naive)
    overflow = f", infinite above {edge:.5g}" if edge < RANGE[1] else ""
    expected = f"log(1 + exp(x)) in {name} is 0 below log(unit roundoff) = {lost:.4g}{overflow}"
    lab.expect(expected, f"not so at {wrong} inputs" if wrong else "so it is", not wrong, seen=len(naive))
    # A subnormal result, or a zero, has a relative error that is no fault of the function.
    normal = [
        math.inf if math.isnan(error) else error
        for x, error in zip(stats.inputs[name], stats.softplus[name, "stable"], strict=True)
        if math.exp(min(x, 0.0)) >= 2 * form.smallest_normal
    ]
    limit = 4 * form.unit_roundoff
    expected = (
        f"softplus of PyTorch in {name} is off by at most four roundings ({limit:.2g}) on {RANGE[0]:g} to "
        f"{RANGE[1]:g}, where its result is a normal number"
    )
    lab.at_most(expected, max(normal, default=math.inf), limit, seen=len(normal), warns=True)


def _check_softmax(stats: ExpStats, name: str, lab: Expectations) -> None:
    """The naive softmax overflows with its largest power; the stable one is off by n + 4 roundings.

    The differences of `LOGITS` are exact. exp is right to one ULP (two roundings), in the numerator and in the sum of n
    terms, which takes n - 1 roundings more, and the quotient one: n + 4. Below the smallest normal number a power and a
    quotient are half of the smallest subnormal off each.
    """
    form = format_of(name)
    nans = sum(not math.isfinite(p) for p in stats.softmax[name, "naive"])
    fits = max(LOGITS) <= last_finite(form)
    expected = f"naive softmax of {_LISTED} in {name} is {'finite' if fits else 'NaN'}"
    outcome = f"{nans} of {len(LOGITS)} are NaN" if nans else "finite"
    lab.expect(expected, outcome, (nans == 0) == fits, seen=len(LOGITS))
    count = len(LOGITS) + 4
    limit = count * form.unit_roundoff / (1 - count * form.unit_roundoff)
    errors = [
        max(abs(p - exact) - form.smallest_subnormal, 0.0) / exact if math.isfinite(p) else math.inf
        for p, exact in zip(stats.softmax[name, "stable"], stats.exact, strict=True)
    ]
    expected = (
        f"softmax of PyTorch of {_LISTED} in {name} is off by at most {count} roundings ({limit:.2g}), beyond "
        f"the smallest subnormal, {form.smallest_subnormal:.2g}"
    )
    lab.at_most(expected, max(errors, default=math.inf), limit, seen=len(errors), warns=True)


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of the edges and of softmax, charts of the errors of softplus."""
    progress("exp, softplus and softmax", 0, 1)
    stats = measure_exp(device)
    seen = {"values of exp, softplus and softmax": sum(map(len, stats.softplus.values()))}
    results = {("float64", "stable"): stats.exact, **stats.softmax}
    rows = [(*key, *(f"{p:.3g}" for p in probabilities)) for key, probabilities in results.items()]
    columns = ("format", "form", *(f"of {logit:g}" for logit in LOGITS))
    note = "naive: exp(x) / sum(exp(x)); stable: torch.softmax, which subtracts the largest first."
    softmax = Table(f"softmax of {_LISTED}", columns, rows, note=note)
    tables, charts = (edges_table(stats), softmax), [softplus_chart(stats, way) for way in SOFTPLUS]
    return run_of(check_exp(stats), seen, tables=tables, charts=charts)


def softplus_chart(stats: ExpStats, way: str) -> Chart:
    """Relative error over x of one form of softplus, a line for each format."""
    series = [
        Series(name, stats.inputs[name], [max(error, _FLOOR) for error in errors])
        for (name, own), errors in stats.softplus.items()
        if own == way
    ]
    if way == "naive":
        title, remark = "log(1 + exp(x)), as written", "A line that ends has become infinite."
    else:
        title = "torch.nn.functional.softplus, the same function"
        remark = f"The smallest number of float16 is {format_of('float16').smallest_subnormal:.2g}."
    note = f"1 is a result of zero. {remark} Errors below {_FLOOR:.2g} are drawn there."
    return Chart("line", title, "x", "relative error against float64", series, note=note, y_scale="log")


def edges_table(stats: ExpStats) -> Table:
    """The last x with a finite exp and the first without, measured or derived from the bits."""
    rows: list[tuple[Scalar, ...]] = []
    for name in _SHOWN:
        form = format_of(name)
        last = stats.edges.get(name, last_finite(form))
        beyond = form.decode(form.encode(last) + 1) if math.isfinite(last) else math.nan
        edges = (distinct(x, form) for x in (math.log(form.overflows_at), last, beyond))
        rows.append((name, f"{form.max:.6g}", *edges, "measured" if name in stats.edges else "its bits"))
    columns = ("format", "largest value", "log of where it ends", "last finite at x", "not finite at x", "known by")
    note = "x and exp(x) are numbers of the format. PyTorch has no exp in tf32 and float8: derived from their bits."
    return Table(f"Where exp overflows on {stats.device}", columns, rows, note=note)
