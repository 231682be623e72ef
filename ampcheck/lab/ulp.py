"""The distance between neighbouring numbers of a format, by its formula and by its bit patterns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ampcheck.core.formats import FORMATS, format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Coverage, Finding, Run, Series, Table
from ampcheck.lab.expectations import ARITHMETIC, Expectations, lacks
from ampcheck.lab.registry import check_of

CHECK = check_of("ulp")

EXPONENTS = (-10, 20)
"""From 2^-10 to 2^20."""

_DRAWN = ("float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_WORDS = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}
_MAGNITUDES = (0.001, 1.0, 100.0, 256.0, 2048.0, 65504.0, 1e6)


@dataclass(frozen=True, slots=True)
class UlpStats:
    """compared: magnitudes at which both spacings are known, by dtype; wrong: those at which they differ, with the
    spacing of the bit patterns and that of the formula; lacking: why a dtype was not looked at."""

    device: str
    compared: dict[str, int]
    wrong: tuple[tuple[str, float, float, float], ...]
    lacking: dict[str, str]


def measure_ulps(device: str = "cpu") -> UlpStats:
    """Step from each power of two, and from the middle of each binade, to the next bit pattern on the device."""
    compared: dict[str, int] = {}
    wrong: list[tuple[str, float, float, float]] = []
    lacking: dict[str, str] = {}
    for name in ARITHMETIC:
        if why := lacks(name, device):
            lacking[name] = why
            continue
        form, dtype = format_of(name), getattr(torch, name)
        places = [m * 2.0**e for e in range(EXPONENTS[0], EXPONENTS[1] + 1) for m in (1.0, 1.5)]
        places = [place for place in places if place + form.ulp(place) <= form.max]
        here = torch.tensor(places, dtype=dtype, device=device)
        after = (here.view(_WORDS[name]) + 1).view(dtype)
        steps = (after.cpu().double() - here.cpu().double()).tolist()
        compared[name] = len(places)
        pairs = zip(places, steps, strict=True)
        wrong += [(name, place, step, form.ulp(place)) for place, step in pairs if step != form.ulp(place)]
    return UlpStats(device, compared, tuple(wrong), lacking)


def check_ulps(stats: UlpStats) -> list[Finding]:
    """The next bit pattern is one ULP away."""
    total = sum(stats.compared.values())
    found = f"{total} of {total} magnitudes in {', '.join(stats.compared)}"
    if stats.wrong:
        name, place, step, wanted = stats.wrong[0]
        found = f"not so at {len(stats.wrong)} magnitudes; first {name} at {place:g}: {step:g} instead of {wanted:g}"
    expected = "the next bit pattern after x is one ULP, 2^(floor(log2 x) - mantissa bits), away"
    lab = Expectations(CHECK, stats.device)
    lab.expect(expected, found, total > 0 and not stats.wrong, seen=total)
    for why in stats.lacking.values():
        lab.skip(why)
    return lab.findings


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """A chart of spacings from 2^-10 to 2^20 and a table of what they mean."""
    progress("spacings", 0, 1)
    stats = measure_ulps(device)
    return Run(
        findings=tuple(check_ulps(stats)),
        coverage=Coverage({"magnitudes": sum(stats.compared.values())}, dict.fromkeys(stats.lacking.values(), 1)),
        tables=(_spacings(), _integers()),
        charts=(ulp_chart(),),
    )


def ulp_chart() -> Chart:
    """Spacing over magnitude; a format ends where its largest value does."""
    series = []
    for name in _DRAWN:
        form = format_of(name)
        x, y = [], []
        for exponent in range(*EXPONENTS):  # a flat step for each binade
            if math.ldexp(1.0, exponent) <= form.max:
                end = min(exponent + 1.0, math.log2(form.max))
                x += [float(exponent), end]
                y += [math.log2(form.ulp(math.ldexp(1.0, exponent)))] * 2
        series.append(Series(name, x, y))
    return Chart(
        "line",
        "ULP against magnitude",
        "magnitude",
        "distance to the next number (ULP)",
        series=tuple(series),
        check=CHECK.slug,
        note="Each step is one power of two wide. A line ends where the format does; tf32 lies on float16 and goes on; "
        "float8_e4m3fn is flat at the left, where it is subnormal.",
        x_scale="exponent",
        y_scale="exponent",
    )


def _spacings() -> Table:
    rows = [
        (name, *(f"{form.ulp(x):.3g}" if x <= form.max else "beyond" for x in _MAGNITUDES))
        for name, form in FORMATS.items()
        if form.mantissa_bits
    ]
    return Table(
        "Distance to the next number",
        ("format", *(f"at {x:,g}" for x in _MAGNITUDES)),
        rows,
        check=CHECK.slug,
        note="Half of it is the largest error of a rounding, and the largest update that may be lost.",
    )


def _integers() -> Table:
    rows = [
        (name, f"{form.largest_exact_integer:,}", f"{form.unit_roundoff:.3g}", form.decimal_digits)
        for name, form in FORMATS.items()
    ]
    return Table(
        "What a format can count",
        ("format", "counts exactly up to", "unit roundoff", "decimal digits"),
        rows,
        check=CHECK.slug,
        note="Positions, token counts and step counters are integers: beyond this one some of them are skipped.",
    )
