"""Are gradients summed, and is their norm taken, in a format that keeps their digits? (`reduce-precision`)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ampcheck.catalog.training import REDUCE_PRECISION
from ampcheck.core.check import Evidence
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Scalar, Table, Verdict, Where
from ampcheck.training.lineage import Lineage
from ampcheck.training.reductions.norms import NormStats
from ampcheck.training.reductions.sums import FEWEST, ReductionWatch, SumStats

_ROWS = 40


@dataclass(frozen=True, slots=True)
class ReductionStats:
    """The running sums of 8 addends or more, and the total norms, that some code computed."""

    subject: str
    sums: tuple[SumStats, ...] = ()
    norms: tuple[NormStats, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)


def reduction_stats(watch: ReductionWatch, lineage: Lineage, subject: str) -> ReductionStats:
    """The sums and norms of a run that has ended."""
    sums, norms = tuple(watch.sums.values()), tuple(watch.norms.totals)
    seen = {"ops": lineage.ops, "running sums": len(sums), "total norms": len(norms)}
    return ReductionStats(subject, sums, norms, Coverage(seen, lineage.unfollowed))


def check_reductions(stats: ReductionStats, limits: Limits) -> list[Finding]:
    """`reduce-precision`: the findings about running sums and total norms, one for each line of code.

    A sum fails from `limits.reduction` times the error of rounding the exact sum once, and where it overflows though
    the exact sum does not; it only warns where it belongs to a forward, or backward adds it up on its way. A total norm
    in 16 bits warns, and fails where such totals are combined.
    """
    if findings := [*_sums(stats, limits), *_norms(stats)]:
        return findings
    if not stats.sums and not stats.norms:
        text = f"no running sum of {FEWEST} addends or more and no total norm was computed"
        return [REDUCE_PRECISION.skip(stats.subject, text)]
    counts = {f"running sums of {FEWEST} addends or more": len(stats.sums), "total norms": len(stats.norms)}
    text = f"{' and '.join(f'{count} {what}' for what, count in counts.items() if count)} were followed"
    low = [total for total in stats.sums if _judged(total)]
    worst = max((total.ratio for total in low), default=0.0)
    text += (
        f"; the worst 16-bit sum has the error of {worst:.2g} roundings" if low else ", none of them kept in 16 bits"
    )
    seen = len(stats.sums) + len(stats.norms)
    shown = Evidence(observed=worst, limit=limits.reduction, unit="roundings")
    return [REDUCE_PRECISION.passed(stats.subject, text, seen, **shown)]


def _judged(total: SumStats) -> bool:
    return format_of(total.format).bits <= 16 and (total.roundings >= FEWEST - 1 or bool(total.overflowed))


_KINDS = {
    "sum": "a running sum is kept",
    "gradient": "gradients are accumulated",
    "graph": "values of the graph are added up",
}
_HINTS = {
    "sum": "keep the running sum in float32 and round it once at the end (reduce_dtype=torch.float32)",
    "gradient": "accumulate in float32: float32 parameters under autocast, or float32 buffers for the gradients",
    "graph": "add up in float32, or stack the addends and take torch.sum, which adds in float32 inside",
}


def _sums(stats: ReductionStats, limits: Limits) -> Iterator[Finding]:
    places: dict[tuple[str, str, Where], list[SumStats]] = defaultdict(list)
    for total in stats.sums:
        if _judged(total) and (total.overflowed or total.ratio > limits.reduction or total.vanished > limits.underflow):
            places[total.kind, total.format, total.where].append(total)
    for (kind, fmt, where), group in places.items():
        worst = max(group, key=lambda total: (total.overflowed, total.vanished > limits.underflow, total.ratio))
        others = f" ({len(group)} sums)" if len(group) > 1 else ""
        observed: float
        if worst.overflowed:
            observed, limit, unit = worst.overflowed, 0.0, "elements"
            text = f"{observed} followed elements overflow where the exact sum does not"
        elif worst.vanished > limits.underflow:
            observed, limit, unit = worst.vanished, limits.underflow, "share of the addends"
            text = f"{observed:.0%} of the addends' nonzero values had become zero before they were added"
        else:
            observed, limit, unit = worst.ratio, limits.reduction, "roundings"
            text = f"its relative error is {worst.error:.2g}, that of {observed:.2g} roundings of the exact sum"
        message = (
            "a sum of many addends must be as exact as one rounding of it, within a factor of "
            f"{limits.reduction:g}; {_KINDS[kind]} in {fmt}{others}: after {worst.addends} addends {text}"
        )
        verdict = Verdict.WARN if kind == "graph" else Verdict.FAIL
        yield REDUCE_PRECISION.finding(
            verdict, stats.subject, message, where=where, observed=observed, limit=limit, unit=unit,
            hint=_HINTS[kind],
        )  # fmt: skip


def _norms(stats: ReductionStats) -> Iterator[Finding]:
    places: dict[tuple[bool, str, Where], list[NormStats]] = defaultdict(list)
    for norm in stats.norms:
        if norm.grouped or (norm.low and norm.terms > 1) or norm.overflowed:
            places[norm.grouped, norm.format, norm.where].append(norm)
    for (grouped, fmt, where), group in places.items():
        worst = max(group, key=lambda norm: (norm.overflowed, norm.error or 0.0))
        measured = "" if worst.error is None else f", {worst.value:.6g} where float64 gives {worst.exact:.6g}"
        across = " over the shards of several processes" if worst.sharded else ""
        how = (
            f"the norm overflowed{across} in {fmt} although every gradient is finite"
            if worst.overflowed
            else f"totals rounded to {fmt} are combined{across}, so that it depends on how the tensors were grouped"
            if grouped
            else f"{worst.terms} norms are combined{across} in {fmt}"
        )
        message = (
            f"a total norm must be computed in float32; {how}"
            f"{measured}{f' (relative error {worst.error:.2g})' if worst.error is not None else ''}; "
            f"{fmt} has {format_of(fmt).mantissa_bits + 1} significant bits"
        )
        hint = "cast the gradients, or their norms before they are combined, to float32"
        verdict = Verdict.FAIL if grouped or worst.overflowed else Verdict.WARN
        limit = None if worst.error is None else format_of(fmt).unit_roundoff
        yield REDUCE_PRECISION.finding(
            verdict, stats.subject, message, where=where, observed=worst.error, limit=limit, unit="relative error",
            hint=hint,
        )  # fmt: skip


def reduction_table(stats: ReductionStats) -> Table | None:
    """The running sums and total norms, the worst first; None where there is none."""
    sums = sorted(stats.sums, key=lambda total: (not _judged(total), -total.ratio))[:_ROWS]
    norms = sorted(stats.norms, key=lambda norm: (not norm.grouped, not norm.low))[: max(_ROWS - len(sums), 0)]
    rows: list[tuple[Scalar, ...]] = [
        (f"running sum ({total.kind})", total.where.place, total.format, total.addends, total.error, total.once)
        for total in sums
    ]
    rows += [
        ("total norm", total.where.place, total.format, total.terms, total.error, format_of(total.format).unit_roundoff)
        for total in norms
    ]
    columns = ("what", "where", "format", "addends", "relative error", "of one rounding")
    left = len(stats.sums) + len(stats.norms) - len(rows)
    note = f"{left} more are not listed" if left else ""
    return Table("sums and norms in low precision", columns, rows, REDUCE_PRECISION.slug, note) if rows else None
