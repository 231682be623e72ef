"""Comparison of speed records with those of earlier sessions: pytest-benchmark's storage and the history.

It never fails: a stored ratio moves with the load of the machine, so it warns at most.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ampcheck.catalog.speed import REGRESSION
from ampcheck.core.check import Evidence
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.text import listed
from ampcheck.speed.history.storage import load, records_in
from ampcheck.speed.stats import SpeedRecord, differences, hardware_of
from ampcheck.speed.verdict import EFFECT, WHERE, Decision, Rule, percent, whose_fault

WANDER = 0.075
"""By what share two stored ratios differ without a cause. One paired ratio wandered by 1.8 per cent from session to
session on a shared machine, the difference of two by root two of that; this is three times as much."""

AGAIN = "save a new baseline on this machine (--benchmark-save), or measure base and head in one job"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The speed tests of earlier sessions.

    name: as messages call it. records: of each benchmark, none for one that ampcheck did not make. unreadable:
    benchmarks whose record cannot be read, with the reason.
    """

    name: str = "the baseline"
    records: Mapping[str, tuple[SpeedRecord, ...]] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_benchmarks(cls, benchmarks: Iterable[Mapping[str, object]]) -> Baseline:
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
        return cls(records=records, unreadable=unreadable)

    @classmethod
    def of_records(cls, records: Iterable[SpeedRecord], name: str) -> Baseline:
        """Records, by the name of their benchmark."""
        by_name: dict[str, tuple[SpeedRecord, ...]] = {}
        for record in records:
            by_name[record.name] = (*by_name.get(record.name, ()), record)
        return cls(name, by_name)

    @property
    def known(self) -> list[str]:
        """The speed tests in it."""
        return [title for title, records in self.records.items() if records or title in self.unreadable]

    def same(self, record: SpeedRecord) -> list[SpeedRecord]:
        """Its records of the same arms in the benchmark of the same name."""
        return [old for old in self.records[record.name] if (old.arm, old.reference) == (record.arm, record.reference)]


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
        _absent(record, baseline) or _incomparable(record, baseline) or _moved(record, baseline, max(effect, WANDER))
        for record in records
    ]


def check_names(records: Iterable[SpeedRecord], baseline: Baseline) -> list[Finding]:
    """WARN for a benchmark or an arm that the baseline lacks, UNDECIDED for other hardware.

    None for the others, nor where the baseline is empty.
    """
    if not baseline.records:
        return []
    findings = (_absent(record, baseline) or _elsewhere(record, baseline) for record in records)
    return [finding for finding in findings if finding is not None]


def check_missing(ran: Iterable[str], baseline: Baseline) -> list[Finding]:
    """WARN, once, where the baseline has speed tests that did not run. ran: the names of those that did."""
    seen = set(ran)
    missing = [name for name in baseline.known if name not in seen]
    if not missing:
        return []
    count = len(missing)
    message = (
        f"every benchmark of {baseline.name} must run; this session did not run {count} of them: {listed(missing)}"
    )
    hint = "run the whole suite, or save a new baseline where tests were renamed or removed on purpose"
    return [REGRESSION.warn(baseline.name, message, where=WHERE, hint=hint)]


def _absent(new: SpeedRecord, baseline: Baseline) -> Finding | None:
    """The finding where the baseline has nothing to compare with."""
    verdict, hint = Verdict.WARN, "save a new baseline, or give the test its former name"
    if new.name in baseline.unreadable:
        message, verdict, hint = f"not comparable: {baseline.unreadable[new.name]}", Verdict.UNDECIDED, AGAIN
    elif new.name not in baseline.records:
        message = f"{baseline.name} has no benchmark of this name, so nothing was compared"
    elif not baseline.records[new.name]:
        message = f"not comparable: {baseline.name} has absolute times of this name, and no record of ampcheck"
        verdict, hint = Verdict.UNDECIDED, AGAIN
    elif not baseline.same(new):
        pairs = ", ".join(dict.fromkeys(f"{old.arm} against {old.reference}" for old in baseline.records[new.name]))
        message = f"{baseline.name} has no {new.arm} against {new.reference} in its benchmark of this name, but {pairs}"
        hint = "give the arms their former names, or save a new baseline"
    else:
        return None
    return REGRESSION.finding(verdict, new.name, message, where=WHERE, hint=hint)


def _elsewhere(new: SpeedRecord, baseline: Baseline) -> Finding | None:
    """The finding where all earlier records are of other hardware."""
    known = [old.fingerprint for old in baseline.same(new)]
    if any(hardware_of(old) == hardware_of(new.fingerprint) for old in known):
        return None
    others = "; ".join(differences(known[-1], new.fingerprint))
    message = f"not comparable: {baseline.name} has this benchmark on other hardware only ({others})"
    return REGRESSION.undecided(new.name, message, where=WHERE, hint="nothing to do: a series of its own begins here")


def _incomparable(new: SpeedRecord, baseline: Baseline) -> Finding | None:
    """The finding where the last record was measured under other conditions."""
    old = baseline.same(new)[-1]
    changed = differences(old.fingerprint, new.fingerprint)
    changed += [] if old.precision == new.precision else [f"precision: {old.precision} and {new.precision}"]
    if not changed:
        return None
    message = f"not comparable: {'; '.join(changed)}; {_ratios(old, new, baseline)}"
    return REGRESSION.undecided(new.name, message, where=WHERE, hint=AGAIN)


def _moved(new: SpeedRecord, baseline: Baseline, effect: float) -> Finding:
    """The verdict on two comparable records."""
    old = baseline.same(new)[-1]
    limit, noise, ratios = old.ratio / (1 + effect), max(old.noise, new.noise), _ratios(old, new, baseline)
    message = f"the ratio must not fall by more than {percent(effect)}, the variation of stored ratios; {ratios}"
    verdict, hint = Verdict.UNDECIDED, "raise the budget of the test"
    if noise > effect:
        message = f"not comparable: the reference and its twin differed by {percent(noise)}; {ratios}"
    elif new.ratio < limit and new.high < old.low:
        verdict = Verdict.WARN
        message += f": {_fault(old, new)}"
        hint = "measure base and head in one job to confirm it: a stored ratio moves with the machine's load"
    elif min(new.ratio, new.low) < limit:
        message += ": too wide to decide"
    else:
        verdict, rose = Verdict.PASS, new.ratio > old.ratio * (1 + effect) and new.low > old.high
        message += f", so it rose: {_fault(old, new)}" if rose else ""
    evidence = Evidence(where=WHERE, observed=new.ratio, limit=limit, unit="times as fast", hint=hint)
    return REGRESSION.judged(verdict, new.name, message, new.cycles, **evidence)


def _ratios(old: SpeedRecord, new: SpeedRecord, baseline: Baseline) -> str:
    now, before = (f"{record.ratio:.4g} ({record.low:.4g} to {record.high:.4g})" for record in (new, old))
    return f"{new.arm} is {now} times as fast as {new.reference}, it was {before} in {baseline.name}"


def _fault(old: SpeedRecord, new: SpeedRecord) -> str:
    """Which absolute time moved: a hint, for absolute times wander far more than their ratio."""
    seconds = [(old.reference_seconds, new.reference_seconds), (old.arm_seconds, new.arm_seconds)]
    if not all(before > 0 and now > 0 for before, now in seconds):
        return "whose time moved is not known"
    reference, arm = (
        Decision(Verdict.UNDECIDED, ratio, ratio, ratio) for ratio in (before / now for before, now in seconds)
    )
    clause = whose_fault(reference, arm, Rule(), names=(new.reference, new.arm))
    return f"by absolute times, which are a hint, {clause or 'neither of the two moved much'}"
