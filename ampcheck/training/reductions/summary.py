"""The record of sums and norms of a run, and its table."""

from __future__ import annotations

from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Scalar, Table
from ampcheck.records.reductions import ReductionStats
from ampcheck.training.lineage import Lineage
from ampcheck.training.reductions.sums import ReductionWatch

_ROWS = 40


def reduction_stats(watch: ReductionWatch, lineage: Lineage, subject: str) -> ReductionStats:
    """The sums and norms of a run that has ended."""
    sums, norms = tuple(watch.sums.values()), tuple(watch.norms.totals)
    seen = {"ops": lineage.ops, "running sums": len(sums), "total norms": len(norms)}
    return ReductionStats(subject, sums, norms, Coverage(seen, lineage.unfollowed))


def reduction_table(stats: ReductionStats) -> Table | None:
    """The running sums and total norms, the worst first; None where there is none."""
    sums = sorted(stats.sums, key=lambda total: (not total.judged, -total.ratio))[:_ROWS]
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
    return Table("sums and norms in low precision", columns, rows, "reduce-precision", note) if rows else None
