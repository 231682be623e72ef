"""What a speed test does, pytest apart: measure, judge, keep a record, and compare it with what was kept before.

A verdict rests on the paired ratio of this session alone. What earlier sessions stored is compared too, and never
fails: a stored ratio moves with what else the machine does, so it warns at most.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where, passed
from ampcheck.speed.clock import Clock
from ampcheck.speed.fingerprint import differences
from ampcheck.speed.history.lines import load
from ampcheck.speed.history.points import hardware_of, record_from_dict
from ampcheck.speed.judge import measure_until_decided, speed_run
from ampcheck.speed.paired import BUDGET, PairedMeasurement, Step, measure_speed
from ampcheck.speed.stats import SpeedRecord, SpeedStats
from ampcheck.speed.verdict import (
    EFFECT,
    FALSE_ALARMS,
    Decision,
    Rule,
    check_speed,
    limits_of,
    record_of,
    requirement,
    whose_fault,
)

WANDER = 0.075
"""By what share two stored ratios differ without a cause. One paired ratio wandered by 1.8 per cent from session to
session on a shared machine, the difference of two by root two of that; this is three times as much."""


AGAIN = "save a new baseline on this machine (--benchmark-save), or measure base and head in one job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a speed test asks for, as `assert_speed` and `measure_speed` take it.

    precision: what the arms compute in, one of `ampcheck.speed.steps.PRECISIONS`; only like is compared with like.
    comparisons: of the whole suite; None for those of this test times the tests of the session. width: for `measure`.
    """

    at_least: float | Mapping[str, float] = 1.0
    effect: float = EFFECT
    budget: float = BUDGET
    precision: str = "float32"
    false_alarms: float = FALSE_ALARMS
    comparisons: int | None = None
    subject: str = ""
    device: str = "cpu"
    width: float | None = 0.005
    clock: Clock | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("budget", "effect", "false_alarms", "width"):
            value = getattr(self, name)
            if name == "width" and value is None:  # until the budget is spent
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise UsageError(f"{name} of a speed test is a positive number; found {value!r}")
        number = self.comparisons
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise UsageError(f"comparisons of a speed test is a whole number, at least 1; found {number!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageError(f"seed of a speed test is a whole number; found {self.seed!r}")
        if self.precision != "float32":
            _require_precision(self.precision)

    @classmethod
    def of(cls, *given: Mapping[str, Any]) -> Asked:
        """Defaults, and what is given over them; the later counts. Raises `UsageError` for a name it does not know."""
        known = [one.name for one in fields(cls)]
        merged = {name: value for one in given for name, value in one.items()}
        if unknown := [name for name in merged if name not in known]:
            raise UsageError(f"a speed test takes no {unknown[0]!r}; it takes {', '.join(known)}")
        return cls(**merged)


def _require_precision(name: str) -> None:
    from ampcheck.speed.steps import PRECISIONS  # heavy, and needed for nothing else

    if name not in PRECISIONS:
        raise UsageError(
            f"precision of a speed test is one of {', '.join(PRECISIONS)}, what its arms compute in; found {name!r}"
        )


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One speed test that ran. records: one for each arm that was judged, or was measured without a verdict."""

    stats: SpeedStats
    run: Run
    records: tuple[SpeedRecord, ...]


def judge_benchmark(arms: Mapping[str, Step], asked: Asked, *, name: str, tests: int = 1) -> Benchmark:
    """Measure the arms and judge those that `asked.at_least` speaks of.

    tests: how many speed tests the session has. Each of them gets an equal part of the false alarms that the suite may
    make, and shares it among its arms: together they make at most `false_alarms`, whatever the others do.
    """
    limits = limits_of(arms, asked.at_least)
    number = asked.comparisons or max(1, tests * len(limits))
    rules = {arm: Rule(limit, asked.effect, number, asked.false_alarms) for arm, limit in limits.items()}
    stats = measure_until_decided(
        arms,
        rules,
        subject=asked.subject or name,
        device=asked.device,
        budget=asked.budget,
        clock=asked.clock,
        seed=asked.seed,
    )
    findings = check_speed(stats, rules)
    records = [
        record_of(stats, arm, name=name, precision=asked.precision, verdict=str(finding.verdict))
        for arm, finding in zip(limits, findings, strict=True)
    ]
    run = speed_run(stats, findings)
    shared = f" The confidence is that of {number} comparisons: {tests} speed tests in the session"
    shared += f", {len(limits)} judged arms in this one." if asked.comparisons is None else ", as the test asks."
    (table,) = run.tables
    return Benchmark(stats, replace(run, tables=(replace(table, note=table.note + shared),)), tuple(records))


def measure_benchmark(arms: Mapping[str, Step], asked: Asked, *, name: str) -> Benchmark:
    """Measure the arms until their ratios are known to `asked.width`; nothing is judged."""
    stats = measure_speed(
        arms,
        subject=asked.subject or name,
        device=asked.device,
        budget=asked.budget,
        width=asked.width,
        clock=asked.clock,
        seed=asked.seed,
    )
    records = tuple(record_of(stats, arm.name, name=name, precision=asked.precision) for arm in stats.compared)
    return Benchmark(stats, speed_run(stats), records)


def skip_benchmark(arms: Mapping[str, Step], asked: Asked, *, name: str, reason: str, judged: bool = True) -> Run:
    """Call each arm once and measure nothing: SKIP for each. What an arm raises is raised. judged: there are limits."""
    PairedMeasurement(arms, device=asked.device, clock=asked.clock)  # arms and device are judged as ever
    limits: Mapping[str, float | None] = dict.fromkeys(list(arms)[1:])
    if judged:
        limits = limits_of(arms, asked.at_least)
    for step in arms.values():
        step()
    reference = next(iter(arms))
    findings = []
    for arm, limit in limits.items():
        told = requirement(arm, limit, reference) if limit is not None else f"{arm} is compared with {reference}"
        findings.append(
            Finding(
                "speedup",
                Verdict.SKIP,
                asked.subject or name,
                f"nothing was measured, each arm was called once: {reason}; {told}",
                where=Where(phase="speed"),
                limit=limit,
                unit="times as fast",
                hint="run the speed tests in a session of their own: pytest --benchmark-only, without -n",
            )
        )
    return Run(findings=tuple(findings), coverage=Coverage({"paired cycles": 0}, {reason: len(findings)}))


# What earlier sessions kept --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Baseline:
    """What earlier sessions kept of speed tests.

    name: what a message calls it. records: of each benchmark, none for one that ampcheck did not make. unreadable:
    benchmarks whose record cannot be read, with the reason.
    """

    name: str = "the baseline"
    records: Mapping[str, tuple[SpeedRecord, ...]] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_benchmarks(cls, benchmarks: Iterable[Mapping[str, Any]], name: str = "the baseline") -> Baseline:
        """What pytest-benchmark saved: the list `benchmarks` of its JSON; of equal names the last counts."""
        records: dict[str, tuple[SpeedRecord, ...]] = {}
        unreadable: dict[str, str] = {}
        for benchmark in benchmarks:
            title = str(benchmark.get("fullname", ""))
            kept = (benchmark.get("extra_info") or {}).get("ampcheck")
            records[title] = ()
            unreadable.pop(title, None)
            try:
                records[title] = tuple(record_from_dict(one) for one in _listed(kept))
            except UsageError as error:
                unreadable[title] = str(error)
        return cls(name, records, unreadable)

    @property
    def known(self) -> list[str]:
        """The speed tests in it."""
        return [title for title, records in self.records.items() if records or title in self.unreadable]


@dataclass(frozen=True, slots=True)
class Before:
    """What a history held before this session. notes: what of it could not be read."""

    points: tuple[tuple[datetime, SpeedRecord], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Before:
        """Raises `UsageError` for a folder that cannot be read."""
        history = load(folder)
        held = [(point.time, point.measured) for series in history.series for point in series.points]
        kept = [(time, record) for time, record in held if isinstance(record, SpeedRecord)]
        told = tuple(f"the history could not be read whole: {note}" for note in history.notes)
        return cls(tuple(sorted(kept, key=lambda pair: pair[0])), told)

    def all(self) -> Baseline:
        """Every benchmark that it ever held; made anew by each call."""
        return Baseline("the history", _by_name(record for _, record in self.points))

    def last(self, records: Iterable[SpeedRecord]) -> Baseline:
        """The benchmarks of the last session on the hardware of these records."""
        hardware = [hardware_of(record.fingerprint) for record in records]
        here = [(time, record) for time, record in self.points if hardware_of(record.fingerprint) in hardware]
        newest = max((time for time, _ in here), default=None)
        return Baseline("the history's last session", _by_name(record for time, record in here if time == newest))


def _by_name(records: Iterable[SpeedRecord]) -> dict[str, tuple[SpeedRecord, ...]]:
    found: dict[str, list[SpeedRecord]] = {}
    for record in records:
        found.setdefault(record.name, []).append(record)
    return {name: tuple(held) for name, held in found.items()}


def check_baseline(records: Iterable[SpeedRecord], baseline: Baseline, *, effect: float = EFFECT) -> list[Finding]:
    """Compare each record with the baseline's of the same name; WARN at most.

    A ratio is said to have fallen where the intervals of the two lie apart and the change is above the minimum effect
    and above what stored ratios wander by themselves (`WANDER`).
    """
    return [_compared(record, baseline, max(effect, WANDER)) for record in records]


def check_names(records: Iterable[SpeedRecord], baseline: Baseline) -> list[Finding]:
    """What the baseline lacks: WARN for a benchmark or an arm that it does not know, UNDECIDED for other hardware.

    Nothing is said of the others, nor where the baseline is empty.
    """
    if not baseline.records:
        return []
    return [found for record in records if (found := _lacking(record, baseline) or _elsewhere(record, baseline))]


def check_missing(ran: Iterable[str], baseline: Baseline) -> list[Finding]:
    """WARN, once, where the baseline knows speed tests that did not run. ran: the names of those that did."""
    seen = set(ran)
    missing = [name for name in baseline.known if name not in seen]
    if not missing:
        return []
    told = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    message = f"every benchmark of {baseline.name} must run; this session did not run {len(missing)} of them: {told}"
    hint = "run the whole suite, or save a new baseline where tests were renamed or removed on purpose"
    return [_finding(baseline.name, Verdict.WARN, message, hint)]


def _lacking(new: SpeedRecord, baseline: Baseline) -> Finding | None:
    """The finding where there is nothing to compare with."""
    if new.name in baseline.unreadable:
        return _finding(new.name, Verdict.UNDECIDED, f"not comparable: {baseline.unreadable[new.name]}", AGAIN)
    kept = baseline.records.get(new.name)
    if kept is None:
        message = f"{baseline.name} has no benchmark of this name, so nothing was compared"
        return _finding(new.name, Verdict.WARN, message, "save a new baseline, or give the test its former name")
    if not kept:
        message = f"not comparable: {baseline.name} holds absolute times of this name, and no record of ampcheck"
        return _finding(new.name, Verdict.UNDECIDED, message, AGAIN)
    if not _same(new, baseline):
        pairs = ", ".join(dict.fromkeys(f"{one.arm} against {one.reference}" for one in kept))
        message = f"{baseline.name} has no {new.arm} against {new.reference} in its benchmark of this name, but {pairs}"
        return _finding(new.name, Verdict.WARN, message, "give the arms their former names, or save a new baseline")
    return None


def _elsewhere(new: SpeedRecord, baseline: Baseline) -> Finding | None:
    """The finding where all that there is comes from other hardware."""
    known = [one.fingerprint for one in _same(new, baseline)]
    if any(hardware_of(one) == hardware_of(new.fingerprint) for one in known):
        return None
    others = "; ".join(differences(known[-1], new.fingerprint))
    message = f"not comparable: {baseline.name} has this benchmark on other hardware only ({others})"
    return _finding(new.name, Verdict.UNDECIDED, message, "nothing to do: a series of its own begins here")


def _same(new: SpeedRecord, baseline: Baseline) -> list[SpeedRecord]:
    """The baseline's records of the same arms in the benchmark of the same name."""
    return [one for one in baseline.records[new.name] if (one.arm, one.reference) == (new.arm, new.reference)]


def _compared(new: SpeedRecord, baseline: Baseline, effect: float) -> Finding:
    """The verdict on one record."""
    if (lacking := _lacking(new, baseline)) is not None:
        return lacking
    old = _same(new, baseline)[-1]
    changed = differences(old.fingerprint, new.fingerprint)
    changed += [] if old.precision == new.precision else [f"precision: {old.precision} and {new.precision}"]
    told = f"{new.arm} is {_shown(new)} times as fast as {new.reference}, it was {_shown(old)} in {baseline.name}"
    if changed:
        return _finding(new.name, Verdict.UNDECIDED, f"not comparable: {'; '.join(changed)}; {told}", AGAIN)
    return _moved(old, new, effect, told)


def _moved(old: SpeedRecord, new: SpeedRecord, effect: float, told: str) -> Finding:
    """The verdict on two records that may be compared."""
    limit = old.ratio / (1 + effect)
    required = f"the ratio must not fall by more than {_percent(effect)}, which stored ratios may wander"
    figures = (new.ratio, limit)
    if max(old.noise, new.noise) > effect:
        message = (
            f"not comparable: the reference and its twin differed by {_percent(max(old.noise, new.noise))}; {told}"
        )
        return _finding(new.name, Verdict.UNDECIDED, message, "raise the budget of the test", figures)
    if new.ratio < limit and new.high < old.low:
        hint = "measure base and head in one job before you believe it: a stored ratio moves with the machine's load"
        return _finding(new.name, Verdict.WARN, f"{required}; {told}: {_fault(old, new)}", hint, figures)
    if min(new.ratio, new.low) < limit:
        hint = "raise the budget of the test"
        return _finding(new.name, Verdict.UNDECIDED, f"{required}; {told}: too wide to decide", hint, figures)
    if new.ratio > old.ratio * (1 + effect) and new.low > old.high:
        return _finding(
            new.name, Verdict.PASS, f"{required}; {told}, so it rose: {_fault(old, new)}", "", figures, new.cycles
        )
    return _finding(new.name, Verdict.PASS, f"{required}; {told}", "", figures, new.cycles)


def _fault(old: SpeedRecord, new: SpeedRecord) -> str:
    """Whose absolute time moved: a hint, for absolute times wander far more than their ratio."""
    faster = [old.reference_seconds, new.reference_seconds], [old.arm_seconds, new.arm_seconds]
    if not all(seconds > 0 for pair in faster for seconds in pair):
        return "whose time moved is not known"
    reference, arm = (Decision(Verdict.UNDECIDED, was / now, was / now, was / now) for was, now in faster)
    clause = whose_fault(reference, arm, Rule(), names=(new.reference, new.arm))
    return f"by absolute times, which are a hint, {clause or 'neither of the two moved much'}"


def _finding(
    name: str,
    verdict: Verdict,
    message: str,
    hint: str = "",
    figures: tuple[float, float] | None = None,
    cycles: int = 0,
) -> Finding:
    """figures: the ratio and its limit. cycles: paired timings that a pass rests on."""
    observed, limit = figures or (None, None)
    unit = "times as fast" if figures else ""
    where = Where(phase="speed")
    if verdict is Verdict.PASS:
        return passed(
            "regression", name, message, cycles, where=where, observed=observed, limit=limit, unit=unit, hint=hint
        )
    return Finding("regression", verdict, name, message, where, observed, limit, unit, hint)


def _listed(kept: object) -> list[Any]:
    return [] if kept is None else kept if isinstance(kept, list) else [kept]


def _shown(record: SpeedRecord) -> str:
    return f"{record.ratio:.4g} ({record.low:.4g} to {record.high:.4g})"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
