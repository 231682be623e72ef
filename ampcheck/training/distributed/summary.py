"""Ranks that part, judged, and the table of sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Scalar, Table
from ampcheck.records.protocol import Event
from ampcheck.records.reductions import (
    DistributedStats,
    Drift,
    ReplicaStats,
)
from ampcheck.training.distributed.replicas import place_of


def judge_replicas(subject: str, drift: Drift | None, events: Sequence[Event]) -> list[Finding]:
    """Ranks that hold one model step it alike: `reduce-precision`, of a loss scale `scaler-protocol`."""
    if drift is None or not drift.proven:
        return []
    return findings(ReplicaStats(subject, drift, place_of(drift, events)), Limits())


def sums_table(stats: DistributedStats) -> Table | None:
    """The sums over ranks, the worst first; None where there is none."""
    rows: list[tuple[Scalar, ...]] = [
        (
            f"{total.where.op} ({total.where.phase})",
            total.where.place,
            *(total.format, total.world, total.calls, total.elements, total.error, total.once, total.vanished),
            ", ".join(f"{p.ratio:.2g} at {p.world}" for p in total.predicted[:: max(len(total.predicted) // 4, 1)]),
        )
        for total in sorted(stats.collectives, key=lambda total: -total.ratio)
    ]
    columns = (
        *("collective", "where", "format", "ranks", "calls", "elements", "relative error", "of one rounding"),
        *("became zero", "roundings over more processes"),
    )
    return Table("sums over ranks", columns, rows, "reduce-precision") if rows else None
