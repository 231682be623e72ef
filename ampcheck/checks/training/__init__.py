"""Training loops: what its checks share."""

from __future__ import annotations

from ampcheck.core.check import Evidence
from ampcheck.records.reductions import ReplicaStats


def parted(stats: ReplicaStats) -> Evidence:
    """Return what a finding on ranks that part has besides its message."""
    drift = stats.drift
    unit, count = "parameters" if drift.names else "calls", len(drift.names) or 1
    return Evidence(where=stats.where, observed=count, limit=0, unit=unit, hint=drift.hint)
