"""The distance between neighbouring numbers of a format, by its formula and by its bit patterns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ampcheck.core.formats import FORMATS, format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Finding, Run, Series, Table
from ampcheck.tools.lab.lab import ARITHMETIC, Expectations, run_of, usable

EXPONENTS = (-10, 20)
"""From 2^-10 to 2^20."""

_DRAWN = ("float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_MAGNITUDES = (0.001, 1.0, 100.0, 256.0, 2048.0, 65504.0, 1e6)


@dataclass(frozen=True, slots=True)
class UlpStats:
    """compared: number of compared magnitudes by dtype; wrong: dtype, magnitude, spacing of the bit patterns and of the
    formula where they differ; lacking: why a dtype was not measured."""

    device: str
    compared: dict[str, int]
    wrong: tuple[tuple[str, float, float, float], ...]
    lacking: dict[str, str]


def measure_ulps(device: str = "cpu") -> UlpStats:
    """Step from each power of two, and from the middle of each binade, to the next bit pattern on the device."""
    compared: dict[str, int] = {}
    wrong: list[tuple[str, float, float, float]] = []
    dtypes, lacking = usable(ARITHMETIC, device)
    for name, dtype in dtypes.items():
        form = format_of(name)
        magnitudes = [m * 2.0**e for e in range(EXPONENTS[0], EXPONENTS[1] + 1) for m in (1.0, 1.5)]
        magnitudes = [x for x in magnitudes if x + form.ulp(x) <= form.max]
        values = torch.tensor(magnitudes, dtype=dtype, device=device)
        codes = values.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
        steps = ((codes + 1).view(dtype).cpu().double() - values.cpu().double()).tolist()
        compared[name] = len(magnitudes)
        pairs = zip(magnitudes, steps, strict=True)
        wrong += [(name, x, step, form.ulp(x)) for x, step in pairs if step != form.ulp(x)]
    return UlpStats(device, compared, tuple(wrong), lacking)


def check_ulps(stats: UlpStats) -> list[Finding]:
    """The next bit pattern is one ULP away."""
    total = sum(stats.compared.values())
    outcome = f"{total} of {total} magnitudes in {', '.join(stats.compared)}"
    if stats.wrong:
        name, x, step, ulp = stats.wrong[0]
        outcome = f"not so at {len(stats.wrong)} magnitudes; first {name} at {x:g}: {step:g} instead of {ulp:g}"
    expected = "the next bit pattern after x is one ULP, 2^(floor(log2 x) - mantissa bits), away"
    lab = Expectations("ulp", stats.device)
    lab.expect(expected, outcome, total > 0 and not stats.wrong, seen=total)
    lab.skip(*stats.lacking.values())
    return lab.findings


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """A chart of spacings from 2^-10 to 2^20 and tables of their consequences."""
    progress("spacings", 0, 1)
    stats = measure_ulps(device)
    seen = {"magnitudes": sum(stats.compared.values())}
    return run_of(check_ulps(stats), seen, tables=tables(), charts=[ulp_chart()])


def ulp_chart() -> Chart:
    """Spacing over magnitude; a format ends at its largest value."""
    series = []
    for name in _DRAWN:
        form = format_of(name)
        x, y = [], []
        for exponent in range(*EXPONENTS):  # a flat step for each binade
            if math.ldexp(1.0, exponent) <= form.max:
                x += [float(exponent), min(exponent + 1.0, math.log2(form.max))]
                y += [math.log2(form.ulp(math.ldexp(1.0, exponent)))] * 2
        series.append(Series(name, x, y))
    title, label = "ULP against magnitude", "distance to the next number (ULP)"
    note = (
        "Each step is one power of two wide. A line ends at the largest value of its format; tf32 coincides with "
        "float16 and continues; float8_e4m3fn is flat at the left, where it is subnormal."
    )
    return Chart("line", title, "magnitude", label, series, note=note, x_scale="exponent", y_scale="exponent")


def tables() -> tuple[Table, Table]:
    """The spacings of each format at some magnitudes, and the largest integer up to which it has them all."""
    spacings = [
        (name, *(f"{form.ulp(x):.3g}" if x <= form.max else "beyond" for x in _MAGNITUDES))
        for name, form in FORMATS.items()
        if form.mantissa_bits
    ]
    columns = ("format", *(f"at {x:,g}" for x in _MAGNITUDES))
    note = "Half of it is the largest error of a rounding, and the largest update that may be lost."
    first = Table("Distance to the next number", columns, spacings, note=note)
    integers = [
        (name, f"{form.largest_exact_integer:,}", f"{form.unit_roundoff:.3g}", form.decimal_digits)
        for name, form in FORMATS.items()
    ]
    columns = ("format", "counts exactly up to", "unit roundoff", "decimal digits")
    note = "Positions, token counts and step counters are integers: beyond this one some of them are skipped."
    return first, Table("What a format can count", columns, integers, note=note)
