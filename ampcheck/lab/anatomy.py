"""The bits of a number in every format, the facts of the formats, and whether subnormals survive on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ampcheck.autocast.device import place
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import FORMATS, FloatFormat, format_of, table
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table
from ampcheck.health import SubnormalSupport, measure_subnormal_support
from ampcheck.health.subnormals import flushed_here
from ampcheck.lab.expectations import Expectations, dtype_of, power
from ampcheck.lab.registry import check_of

CHECK = check_of("anatomy")

VALUES: Mapping[str, float] = {"pi": math.pi, "1e-8, an eps": 1e-8, "1e-6": 1e-6, "70,000": 7e4}
"""No format has pi; float16 flushes 1e-8, has 1e-6 as a subnormal, and overflows at 70,000."""

FLUSHING = "cpu, flushing"
"""The CPU after `torch.set_flush_denormal(True)`."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """One value in one format.

    sign, exponent, mantissa: the stored bits; stored: their value. cast: the result of the device's cast from float32;
    None without such a dtype or cast. expected: the values that a cast may give: PyTorch releases differ in what they
    make of a value beyond a float8.
    """

    value: str
    given: float
    format: str
    sign: str
    exponent: str
    mantissa: str
    stored: float
    cast: float | None
    expected: tuple[float, ...]

    @property
    def right(self) -> bool:
        """Whether the device's cast gives an expected value."""
        cast = math.nan if self.cast is None else self.cast
        return any(cast == value or (math.isnan(value) and math.isnan(cast)) for value in self.expected)


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
        _dissected(name, value, form, device)
        for name, value in values.items()
        for form in FORMATS.values()
        if _has_code(form, value)
    ]
    support = {where: measure_subnormal_support(where) for where in dict.fromkeys((device, "cpu"))}
    before = flushed_here()
    try:
        if torch.set_flush_denormal(True):
            support[FLUSHING] = measure_subnormal_support("cpu")
    finally:
        torch.set_flush_denormal(before)
    return AnatomyStats(device, tuple(rows), support)


def _has_code(form: FloatFormat, value: float) -> bool:
    """A format may lack NaN, the sign, or (float8_e8m0fnu, which lacks the sign too) zero."""
    return form.nan != "none" if math.isnan(value) else form.signed or value > 0


def _dissected(name: str, value: float, form: FloatFormat, device: str) -> Anatomy:
    code = form.encode(value)
    fields = form.fields(code)
    wide = value if form.name == "float64" else format_of("float32").round(value)  # PyTorch casts by way of float32
    mantissa = f"{fields.mantissa:0{form.mantissa_bits}b}" if form.mantissa_bits else ""
    return Anatomy(
        name,
        value,
        form.name,
        str(fields.sign) if form.signed else "",
        f"{fields.exponent:0{form.exponent_bits}b}",
        mantissa,
        form.decode(code),
        _cast(wide, form.name, device),
        (form.round(wide), form.round(wide, saturate=True)),
    )


def _cast(value: float, name: str, device: str) -> float | None:
    dtype = dtype_of(name)
    if dtype is None:
        return None
    source = torch.float64 if name == "float64" else torch.float32
    try:
        return float(torch.tensor([value], dtype=source, device=device).to(dtype).cpu().to(torch.float64))
    except (RuntimeError, TypeError, NotImplementedError):  # a packed dtype, or one that the device lacks
        return None


def check_anatomy(stats: AnatomyStats) -> list[Finding]:
    """Casts round as the formats say; subnormals survive."""
    lab = Expectations(CHECK, stats.device)
    compared = [row for row in stats.rows if row.cast is not None]
    wrong = [row for row in compared if not row.right]
    outcome = ", ".join(f"{r.value} becomes {r.cast!r} in {r.format}, not {r.expected[0]!r}" for r in wrong)
    outcome = outcome or f"{len(compared)} of {len(compared)} do"
    expected = "a cast rounds to the nearest value of the format, as its bits say"
    lab.expect(expected, outcome, bool(compared) and not wrong, seen=len(compared))
    support = stats.subnormals.get(stats.device, {})
    kept = {f"{name}, {op}": getattr(one, op) for name, one in support.items() for op in ("multiply", "add", "cast")}
    kept = {name: survives for name, survives in kept.items() if survives is not None}
    lost = [name for name, survives in kept.items() if not survives]
    outcome = (
        f"they are flushed to zero in {'; '.join(lost)}" if lost else f"{len(kept)} of {len(kept)} cases keep them"
    )
    expected = "subnormals survive multiplication, addition and casts (IEEE 754)"
    hint = "values below the smallest normal number are zero here; torch.set_flush_denormal(False) on a CPU"
    lab.expect(expected, outcome, bool(kept) and not lost, seen=len(kept), warns=True, hint="" if not lost else hint)
    return lab.findings


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of bits, of the facts of formats and of subnormals, and a chart of their ranges."""
    progress("bits", 0, 1)
    stats = measure_anatomy(device)
    return Run(
        findings=tuple(check_anatomy(stats)),
        coverage=Coverage({"values in a format": len(stats.rows), "formats": len(FORMATS)}),
        tables=(*bits_tables(stats.rows), facts_table(), _subnormals(stats)),
        charts=(ranges_chart(),),
    )


def dissect(values: Mapping[str, float], *, device: str = "cpu") -> Run:
    """The bits of any values, by name, in every format; whether the device's casts agree.

    Raises `UsageError` for a device that is not there.
    """
    placement = place(device)
    if placement.emulated:
        raise UsageError(f"device {device!r} is not there, and its casts are what would be looked at: use --device cpu")
    stats = measure_anatomy(placement.device, values)
    findings = check_anatomy(stats)[:1]
    coverage = Coverage({"values in a format": len(stats.rows)})
    return Run(findings=tuple(findings), coverage=coverage, tables=bits_tables(stats.rows), title="bits of a number")


def bits_tables(rows: Sequence[Anatomy]) -> tuple[Table, ...]:
    """The fields of each value in each format, one table a value so that bits align, and the values they encode."""
    by_name: dict[str, list[Anatomy]] = {}
    for row in rows:
        by_name.setdefault(row.value, []).append(row)
    note = "As stored: the exponent is biased, and the mantissa lacks its leading one."
    columns = ("format", "sign", "exponent", "mantissa")
    tables: list[Table] = []
    for name, own in by_name.items():
        cells = [(row.format, row.sign, row.exponent, _grouped(row.mantissa)) for row in own]
        tables.append(Table(f"The bits of {name}", columns, cells, check=CHECK.slug, note="" if tables else note))
    values = [(row.format, row.value, f"{row.stored:.10g}", _off(row)) for row in rows]
    note = "Off by: relative to the float64 value."
    columns = ("format", "value", "stored value", "off by")
    return (*tables, Table("The values of the bits", columns, values, check=CHECK.slug, note=note))


def _grouped(bits: str) -> str:
    """Fours from the left: a long mantissa may be folded between them."""
    return " ".join(bits[start : start + 4] for start in range(0, len(bits), 4))


def _off(row: Anatomy) -> str:
    if row.stored == row.given or (math.isnan(row.stored) and math.isnan(row.given)):
        return "0"
    if not (math.isfinite(row.stored) and math.isfinite(row.given)):
        return "everything"
    return f"{abs(row.stored - row.given) / abs(row.given):.2g}"


def facts_table() -> Table:
    """What follows from the parameters of each format."""
    rows = table()
    columns = tuple(rows[0])
    cells: list[tuple[Scalar, ...]] = [
        tuple(f"{value:.6g}" if isinstance(value, float) else value for value in row.values()) for row in rows
    ]
    return Table(
        "Facts of the formats", columns, cells, check=CHECK.slug, note="Derived from the numbers of bits alone."
    )


def _subnormals(stats: AnatomyStats) -> Table:
    rows = [
        (name, place, one.multiply, one.add, one.cast)
        for place, support in stats.subnormals.items()
        for name, one in support.items()
    ]
    return Table(
        f"Do subnormals survive on {stats.device}?",
        ("dtype", "device", "multiply", "add", "cast"),
        rows,
        check=CHECK.slug,
        note="No answer: the device has no such operation in this dtype. Flushing: after "
        "torch.set_flush_denormal(True), which is set back. A CPU computes float16 in float32, where the subnormals of "
        "float16 are normal numbers.",
    )


def ranges_chart() -> Chart:
    """From the smallest value to the largest, of every format but float64, which would make the others too small."""
    rows, wide = [], format_of("float64")
    for form in FORMATS.values():
        if form.name != "float64":
            top, normal, least = (math.log2(v) for v in (form.max, form.smallest_normal, form.smallest_subnormal))
            rows.append(Series(form.name, (least, normal, 0.0, top, top)))
    return Chart(
        "range",
        "What the formats can hold",
        "magnitude, as a power of two",
        series=tuple(rows),
        check=CHECK.slug,
        note="Thick: the normal numbers. Thin, at the left: the subnormals. The dot is 1. float64 "
        f"({power(wide.smallest_subnormal)} to nearly 2^{math.frexp(wide.max)[1]}) is left out.",
    )
