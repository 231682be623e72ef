"""Comparison of speed records with those of earlier sessions: pytest-benchmark's storage and the history.

It never fails: a stored ratio moves with the load of the machine, so it warns at most.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from ampcheck.checks import findings
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.records.speed import (
    EFFECT,
    Baseline,
    MissingTests,
    SpeedRecord,
    StoredComparison,
    hardware_of,
)
from ampcheck.speed.history.storage import load, records_in

WANDER = 0.075
"""By what share two stored ratios differ without a cause. One paired ratio wandered by 1.8 per cent from session to
session on a shared machine, the difference of two by root two of that; this is three times as much."""


def baseline_of(benchmarks: Iterable[Mapping[str, object]]) -> Baseline:
    """The list `benchmarks` of pytest-benchmark's JSON; of equal names the last counts."""
    records: dict[str, tuple[SpeedRecord, ...]] = {}
    unreadable: dict[str, str] = {}
    for benchmark in benchmarks:
        title = str(benchmark.get("fullname", ""))
        records[title] = ()
        unreadable.pop(title, None)
        try:
            records[title] = tuple(records_in(benchmark))
        except UsageError as error:
            unreadable[title] = str(error)
    return Baseline(records=records, unreadable=unreadable)


@dataclass(frozen=True, slots=True)
class EarlierHistory:
    """A history as it was before this session. notes: lines of it that could not be read."""

    points: tuple[tuple[datetime, SpeedRecord], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> EarlierHistory:
        """Raises `UsageError` for a folder that cannot be read."""
        history = load(folder)
        points = [(point.time, point.measured) for series in history.series for point in series.points]
        records = [(time, measured) for time, measured in points if isinstance(measured, SpeedRecord)]
        notes = tuple(f"the history could not be read whole: {note}" for note in history.notes)
        return cls(tuple(sorted(records, key=lambda point: point[0])), notes)

    def all(self) -> Baseline:
        """Every benchmark of all sessions."""
        return Baseline.of_records((record for _, record in self.points), "the history")

    def last(self, records: Iterable[SpeedRecord]) -> Baseline:
        """The benchmarks of the last session on the hardware of these records."""
        hardware = [hardware_of(record.fingerprint) for record in records]
        here = [(time, record) for time, record in self.points if hardware_of(record.fingerprint) in hardware]
        newest = max((time for time, _ in here), default=None)
        return Baseline.of_records((record for time, record in here if time == newest), "the history's last session")


def check_baseline(records: Iterable[SpeedRecord], baseline: Baseline, *, effect: float = EFFECT) -> list[Finding]:
    """Compare each record with the baseline's of the same name; WARN at most.

    A ratio fell where the intervals of the two do not overlap and the change is above the minimum effect and above the
    variation of stored ratios (`WANDER`).
    """
    return [
        f for record in records for f in findings(StoredComparison(record, baseline, max(effect, WANDER)), Limits())
    ]


def check_names(records: Iterable[SpeedRecord], baseline: Baseline) -> list[Finding]:
    """WARN for a benchmark or an arm that the baseline lacks, UNDECIDED for other hardware.

    None for the others, nor where the baseline is empty.
    """
    known = records if baseline.records else ()
    return [finding for record in known for finding in findings(StoredComparison(record, baseline), Limits())]


def check_missing(ran: Iterable[str], baseline: Baseline) -> list[Finding]:
    """WARN, once, where the baseline has speed tests that did not run. ran: the names of those that did."""
    seen = set(ran)
    missing = tuple(name for name in baseline.known if name not in seen)
    return findings(MissingTests(baseline.name, missing), Limits()) if missing else []
