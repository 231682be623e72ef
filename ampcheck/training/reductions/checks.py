"""Are gradients summed, and is their norm taken, in a format that keeps their digits? (`reduce-precision`)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampcheck.core.errors import require_ran
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Scalar, Table, Verdict, Where, passed
from ampcheck.training.reductions.norms import NormStats
from ampcheck.training.reductions.sums import FEWEST, ReductionWatch, SumStats

SLUG = "reduce-precision"

_ROWS = 40


@dataclass(frozen=True, slots=True)
class ReductionStats:
    """The running sums of 8 addends or more, and the total norms, that some code computed."""

    subject: str
    sums: tuple[SumStats, ...] = ()
    norms: tuple[NormStats, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)


def measure_reductions(function: Callable[[], Any], subject: str = "") -> ReductionStats:
    """Call `function()` and follow the running sums and norms that it computes, in any thread that runs its ops.

    Inside compiled graphs nothing is seen. What the function raises is raised.
    """
    with ReductionWatch() as watch:
        require_ran(function(), subject)
    return stats_of(watch, subject or getattr(function, "__name__", "this function"))


def stats_of(watch: ReductionWatch, subject: str) -> ReductionStats:
    """What a watch has seen so far: for code that is run by somebody else, inside `with ReductionWatch() as watch`."""
    sums, norms = tuple(watch.sums()), tuple(watch.norms())
    seen = {"ops": watch.ops, "running sums": len(sums), "total norms": len(norms)}
    return ReductionStats(subject, sums, norms, Coverage(seen))


def check_reductions(stats: ReductionStats, limits: Limits) -> list[Finding]:
    """`reduce-precision`: the findings about running sums and total norms, one for each line of code.

    A sum fails from `limits.reduction` times the error of rounding the exact sum once, and where it overflows though
    the exact sum does not; it only warns where it belongs to a forward, or backward adds it up on its way. A total norm
    in 16 bits warns, and fails where such totals are put together again.
    """
    found = [*_sums(stats, limits), *check_norms(stats.subject, stats.norms)]
    if found:
        return found
    low = [one for one in stats.sums if _judged(one)]
    counts = {f"running sums of {FEWEST} addends or more": len(stats.sums), "total norms": len(stats.norms)}
    looked = " and ".join(f"{count} {what}" for what, count in counts.items() if count)
    if not stats.sums and not stats.norms:
        text = f"no running sum of {FEWEST} addends or more and no total norm was computed"
        return [Finding(SLUG, Verdict.SKIP, stats.subject, text)]
    worst = max((one.ratio for one in low), default=0.0)
    text = (
        f"{looked} were followed, none of them kept in 16 bits"
        if not low
        else f"{looked} were followed; the worst 16-bit sum has the error of {worst:.2g} roundings"
    )
    seen = len(stats.sums) + len(stats.norms)
    return [passed(SLUG, stats.subject, text, seen, observed=worst, limit=limits.reduction, unit="roundings")]


def _judged(one: SumStats) -> bool:
    return format_of(one.format).bits <= 16 and (one.roundings >= FEWEST - 1 or bool(one.overflowed))


def _sums(stats: ReductionStats, limits: Limits) -> Iterator[Finding]:
    places: dict[tuple[str, str, str, int | None], list[SumStats]] = defaultdict(list)
    for one in stats.sums:
        if _judged(one) and (one.overflowed or one.ratio > limits.reduction or one.vanished > limits.underflow):
            places[one.kind, one.format, one.file, one.line].append(one)
    for (kind, fmt, file, line), group in places.items():
        worst = max(group, key=lambda one: (one.overflowed, one.vanished > limits.underflow, one.ratio))
        what = {"gradient": "gradients are accumulated", "graph": "values of the graph are added up"}.get(kind, "")
        others = f" ({len(group)} sums)" if len(group) > 1 else ""
        observed = (
            f"{worst.overflowed} followed elements overflow where the exact sum does not"
            if worst.overflowed
            else f"{worst.vanished:.0%} of the addends' nonzero values had become zero before they were added"
            if worst.vanished > limits.underflow
            else f"its relative error is {worst.error:.2g}, that of {worst.ratio:.2g} roundings of the exact sum "
            f"(float32: {worst.wide:.2g})"
        )
        message = (
            "a sum of many addends must be as exact as one rounding of it, within a factor of "
            f"{limits.reduction:g}; {what or 'a running sum is kept'} in {fmt}{others}: after {worst.addends} addends "
            f"{observed}"
        )
        phase = {"sum": "update", "gradient": "backward"}.get(kind, "")
        yield Finding(
            SLUG,
            Verdict.WARN if kind == "graph" else Verdict.FAIL,
            stats.subject,
            message,
            Where(phase=phase, op="aten::add", file=file, line=line),
            *_measure(worst, limits),
            _sum_hint(kind),
        )


def _measure(one: SumStats, limits: Limits) -> tuple[float, float, str]:
    if one.overflowed:
        return float(one.overflowed), 0.0, "elements"
    if one.vanished > limits.underflow:
        return one.vanished, limits.underflow, "share of the addends"
    return one.ratio, limits.reduction, "roundings"


def _sum_hint(kind: str) -> str:
    if kind == "gradient":
        return "accumulate in float32: float32 parameters under autocast, or float32 buffers for the gradients"
    if kind == "graph":
        return "add up in float32, or stack the addends and take torch.sum, which adds in float32 inside"
    return "keep the running sum in float32 and round it once at the end (reduce_dtype=torch.float32)"


def check_norms(subject: str, norms: Sequence[NormStats]) -> Iterator[Finding]:
    """The findings about total norms alone, one for each line of code."""
    places: dict[tuple[bool, str, str, int | None], list[NormStats]] = defaultdict(list)
    for one in norms:
        if one.grouped or (one.low and one.terms > 1) or one.overflowed:
            places[one.grouped, one.format, one.file, one.line].append(one)
    for (grouped, fmt, file, line), group in places.items():
        worst = max(group, key=lambda one: (one.overflowed, one.error or 0.0))
        measured = "" if worst.error is None else f", {worst.value:.6g} where float64 gives {worst.exact:.6g}"
        how = (
            "it is not finite though every tensor is; norms or their powers are"
            if worst.overflowed
            else "totals rounded to 16 bits are put together again, so that it depends on how the tensors were grouped"
            if grouped
            else f"{worst.terms} norms are put together"
        )
        across = " over the shards of several processes" if worst.sharded else ""
        message = (
            f"a total norm must be computed in float32; {how}{across} in {fmt}"
            f"{measured}{f' (relative error {worst.error:.2g})' if worst.error is not None else ''}; "
            f"{fmt} has {format_of(fmt).mantissa_bits + 1} significant bits"
        )
        yield Finding(
            SLUG,
            Verdict.FAIL if grouped or worst.overflowed else Verdict.WARN,
            subject,
            message,
            Where(phase="update", op="aten::linalg_vector_norm", file=file, line=line),
            worst.error,
            format_of(fmt).unit_roundoff if worst.error is not None else None,
            "relative error" if worst.error is not None else "",
            "cast the gradients, or their norms before they are put together, to float32",
        )


def reduction_table(stats: ReductionStats) -> Table | None:
    """The running sums and total norms, the worst first; None where there is none."""
    sums = sorted(stats.sums, key=lambda one: (not _judged(one), -one.ratio))[:_ROWS]
    norms = sorted(stats.norms, key=lambda one: (not one.grouped, not one.low))[: max(_ROWS - len(sums), 0)]
    rows: list[tuple[Scalar, ...]] = [
        (f"running sum ({one.kind})", _place(one), one.format, one.addends, one.error, one.once, one.wide)
        for one in sums
    ]
    rows += [
        ("total norm", _place(one), one.format, one.terms, one.error, format_of(one.format).unit_roundoff, None)
        for one in norms
    ]
    columns = ("what", "where", "format", "addends", "relative error", "of one rounding", "in float32")
    left = len(stats.sums) + len(stats.norms) - len(rows)
    note = f"{left} more are not listed" if left else ""
    return Table("sums and norms in low precision", columns, rows, SLUG, note) if rows else None


def _place(one: SumStats | NormStats) -> str:
    return f"{one.file}:{one.line}" if one.file else ""
