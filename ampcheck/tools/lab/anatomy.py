"""The bits of a number in every format, the facts of the formats, and whether subnormals survive on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from textwrap import wrap

import torch

from ampcheck.autocast.device import place
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import FORMATS, FloatFormat, format_of, table
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Finding, Run, Series, Table
from ampcheck.health import SubnormalSupport, measure_subnormal_support
from ampcheck.tools.lab.lab import Expectations, power, run_of
from ampcheck.torchtools.subnormals import flushed_here

VALUES: Mapping[str, float] = {"pi": math.pi, "1e-8, an eps": 1e-8, "1e-6": 1e-6, "70,000": 7e4}
"""No format has pi; float16 flushes 1e-8, has 1e-6 as a subnormal, and overflows at 70,000."""

FLUSHING = "cpu, flushing"
"""The CPU after `torch.set_flush_denormal(True)`."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """One value in one format.

    sign, exponent, mantissa: the stored bits; stored: their value. cast: the result of the device's cast from float32;
    None without such a dtype or cast. expected: allowed results of the cast: PyTorch releases differ in values beyond
    a float8.
    """

    label: str
    value: float
    format: str
    sign: str
    exponent: str
    mantissa: str
    stored: float
    cast: float | None
    expected: tuple[float, ...]

    @property
    def right(self) -> bool:
        """True if the device's cast gives an expected value."""
        return self.cast is not None and any(_same(self.cast, value) for value in self.expected)


@dataclass(frozen=True, slots=True)
class AnatomyStats:
    """Values in all formats, and the support of subnormals by device and dtype."""

    device: str
    rows: tuple[Anatomy, ...]
    subnormals: Mapping[str, Mapping[str, SubnormalSupport]]


def measure_anatomy(device: str = "cpu", values: Mapping[str, float] = VALUES) -> AnatomyStats:
    """The bits of named values in every format that can encode them, and their casts on `device`; the support of
    subnormals there and on the CPU, with and without flushing."""
    rows = [
        _dissected(label, value, form, device)
        for label, value in values.items()
        for form in FORMATS.values()
        # A format may lack NaN, the sign, or (float8_e8m0fnu, which lacks the sign too) zero.
        if (form.nan != "none" if math.isnan(value) else form.signed or value > 0)
    ]
    support = {name: measure_subnormal_support(name) for name in dict.fromkeys((device, "cpu"))}
    before = flushed_here()
    try:
        if torch.set_flush_denormal(True):
            support[FLUSHING] = measure_subnormal_support("cpu")
    finally:
        torch.set_flush_denormal(before)
    return AnatomyStats(device, tuple(rows), support)


def _dissected(label: str, value: float, form: FloatFormat, device: str) -> Anatomy:
    code = form.encode(value)
    fields = form.fields(code)
    sign = str(fields.sign) if form.signed else ""
    exponent = f"{fields.exponent:0{form.exponent_bits}b}"
    mantissa = f"{fields.mantissa:0{form.mantissa_bits}b}" if form.mantissa_bits else ""
    wide = value if form.name == "float64" else format_of("float32").round(value)  # PyTorch casts by way of float32
    expected = (form.round(wide), form.round(wide, saturate=True))
    cast, dtype = None, getattr(torch, form.name, None)
    source = torch.float64 if form.name == "float64" else torch.float32
    if dtype is not None:
        with suppress(RuntimeError, TypeError, NotImplementedError):  # a packed dtype, or one that the device lacks
            cast = float(torch.tensor([wide], dtype=source, device=device).to(dtype).cpu().to(torch.float64))
    return Anatomy(label, value, form.name, sign, exponent, mantissa, form.decode(code), cast, expected)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def check_anatomy(stats: AnatomyStats) -> list[Finding]:
    """Casts round as the formats say; subnormals survive."""
    lab = Expectations("anatomy", stats.device)
    compared = [row for row in stats.rows if row.cast is not None]
    wrong = [row for row in compared if not row.right]
    outcome = ", ".join(f"{row.label} becomes {row.cast!r} in {row.format}, not {row.expected[0]!r}" for row in wrong)
    outcome = outcome or f"{len(compared)} of {len(compared)} do"
    expected = "a cast rounds to the nearest value of the format, as its bits say"
    lab.expect(expected, outcome, bool(compared) and not wrong, seen=len(compared))
    support = stats.subnormals.get(stats.device, {})
    survives = {
        f"{name}, {op}": getattr(row, op) for name, row in support.items() for op in ("multiply", "add", "cast")
    }
    lost = [name for name, answer in survives.items() if answer is False]
    count = sum(answer is not None for answer in survives.values())
    outcome = f"they are flushed to zero in {'; '.join(lost)}" if lost else f"{count} of {count} cases keep them"
    expected = "subnormals survive multiplication, addition and casts (IEEE 754)"
    hint = "values below the smallest normal number are zero here; torch.set_flush_denormal(False) on a CPU"
    lab.expect(expected, outcome, bool(count) and not lost, seen=count, warns=True, hint=hint if lost else "")
    return lab.findings


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of bits, of the facts of formats and of subnormals, and a chart of their ranges."""
    progress("bits", 0, 1)
    stats = measure_anatomy(device)
    facts = table()
    cells = [[f"{value:.6g}" if isinstance(value, float) else value for value in row.values()] for row in facts]
    derived = Table("Facts of the formats", tuple(facts[0]), cells, note="Derived from the numbers of bits alone.")
    seen = {"values in a format": len(stats.rows), "formats": len(FORMATS)}
    tables = (*bits_tables(stats.rows), derived, subnormals_table(stats))
    return run_of(check_anatomy(stats), seen, tables=tables, charts=[_ranges()])


def dissect(values: Mapping[str, float], *, device: str = "cpu") -> Run:
    """The bits of any values, by name, in every format; whether the device's casts agree.

    Raises `UsageError` for a device that is not there.
    """
    placement = place(device)
    if placement.emulated:
        raise UsageError(f"device {device!r} is not there, and its casts are what would be looked at: use --device cpu")
    stats = measure_anatomy(placement.device, values)
    findings = check_anatomy(stats)[:1]
    tables = [replace(table, check=findings[0].check) for table in bits_tables(stats.rows)]
    run = run_of(findings, {"values in a format": len(stats.rows)}, tables=tables)
    return replace(run, title="bits of a number")


def bits_tables(rows: Sequence[Anatomy]) -> tuple[Table, ...]:
    """The fields of each value in each format, one table a value so that bits align, and the values they encode."""
    tables, note = [], "As stored: the exponent is biased, and the mantissa lacks its leading one."
    for label, group in groupby(rows, lambda row: row.label):
        cells = [(row.format, row.sign, row.exponent, " ".join(wrap(row.mantissa, 4))) for row in group]
        tables.append(Table(f"The bits of {label}", ("format", "sign", "exponent", "mantissa"), cells, note=note))
        note = ""
    values = [(row.format, row.label, f"{row.stored:.10g}", _error(row)) for row in rows]
    columns, note = ("format", "value", "stored value", "off by"), "Off by: relative to the float64 value."
    return (*tables, Table("The values of the bits", columns, values, note=note))


def _error(row: Anatomy) -> str:
    if math.isfinite(row.stored - row.value):
        return f"{abs(row.stored - row.value) / abs(row.value):.2g}" if row.stored != row.value else "0"
    return "0" if _same(row.stored, row.value) else "everything"


def subnormals_table(stats: AnatomyStats) -> Table:
    """Which operations preserve subnormals, by dtype and device."""
    rows = [
        (name, device, row.multiply, row.add, row.cast)
        for device, support in stats.subnormals.items()
        for name, row in support.items()
    ]
    note = (
        "No answer: the device has no such operation in this dtype. Flushing: after torch.set_flush_denormal(True), "
        "which is restored. A CPU computes float16 in float32, where the subnormals of float16 are normal numbers."
    )
    columns = ("dtype", "device", "multiply", "add", "cast")
    return Table(f"Do subnormals survive on {stats.device}?", columns, rows, note=note)


def _ranges() -> Chart:
    """From the smallest value to the largest, of every format but float64, which would make the others too small."""
    series = []
    for name, form in FORMATS.items():
        if name != "float64":
            top, normal, least = (math.log2(x) for x in (form.max, form.smallest_normal, form.smallest_subnormal))
            series.append(Series(name, (least, normal, 0.0, top, top)))
    wide = format_of("float64")
    note = (
        "Thick: the normal numbers. Thin, at the left: the subnormals. The dot is 1. float64 "
        f"({power(wide.smallest_subnormal)} to nearly 2^{math.frexp(wide.max)[1]}) is left out."
    )
    return Chart("range", "The range of the formats", "magnitude, as a power of two", series=series, note=note)
