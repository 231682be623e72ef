"""A speed test without pytest: measure, judge, and the records to store.

A verdict rests on the paired ratio of this session alone; `speed.baseline` compares it with earlier sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ampcheck.checks.speed import WHERE, requirement
from ampcheck.checks.speed.speedup import CHECK as SPEEDUP
from ampcheck.core.arguments import parse_choice, parse_number
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage, Run
from ampcheck.records.speed import SpeedRecord, SpeedStats
from ampcheck.speed.judge import measure_until_decided, speed_run
from ampcheck.speed.options import USED_BY, SpeedOptions
from ampcheck.speed.paired import BUDGET, PairedMeasurement, Step, measure_speed
from ampcheck.speed.verdict import check_speed, limits_of, record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTestOptions(SpeedOptions):
    """The arguments of a speed test: those of `SpeedOptions` that apply to arms, and these.

    at_least, subject, device: as of `assert_speed`. width: of `measure_speed`. precision: of the arms, one of
    `ampcheck.speed.steps.PRECISIONS`; only equal precisions are compared.
    """

    at_least: float | Mapping[str, float] = 1.0
    precision: str = "float32"
    subject: str = ""
    device: str = "cpu"
    width: float | None = 0.005

    def __post_init__(self) -> None:
        SpeedOptions.__post_init__(self)
        if self.width is not None:  # None: until the budget is spent
            parse_number(self.width, "width")
        if self.precision != "float32":
            from ampcheck.speed.steps import PRECISIONS  # imports torch

            parse_choice(self.precision, "precision", PRECISIONS)

    @classmethod
    def of(cls, *arguments: Mapping[str, object]) -> SpeedTestOptions:
        """Arguments by name; the later ones count. Raises `UsageError` for an unknown name."""
        known = ("at_least", "precision", "subject", "device", "width", *USED_BY["arms"])
        merged = {name: value for several in arguments for name, value in several.items()}
        if unknown := [name for name in merged if name not in known]:
            raise UsageError(f"a speed test takes no {unknown[0]!r}; it takes {', '.join(known)}")
        return cls(**merged)  # type: ignore[arg-type]  # checked by __post_init__


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One speed test that ran. records: one for each arm that was judged, or was measured without a verdict."""

    stats: SpeedStats
    run: Run
    records: tuple[SpeedRecord, ...]


def judge_benchmark(arms: Mapping[str, Step], options: SpeedTestOptions, *, name: str, tests: int = 1) -> Benchmark:
    """Measure the arms and judge those that `options.at_least` names.

    tests: how many speed tests the session has. Each of them gets an equal part of the false alarms that the suite may
    make, and shares it among its arms: together they make at most `false_alarms`.
    """
    limits = limits_of(arms, options.at_least)
    rules = {arm: options.rule(limit, max(1, tests * len(limits))) for arm, limit in limits.items()}
    stats = measure_until_decided(arms, rules, options, subject=options.subject or name, device=options.device)
    findings = check_speed(stats, rules)
    records = tuple(
        record_of(stats, arm, name=name, precision=options.precision, verdict=str(finding.verdict))
        for arm, finding in zip(limits, findings, strict=True)
    )
    run = speed_run(stats, findings)
    comparisons = next(iter(rules.values())).comparisons
    shared = f" The confidence is that of {comparisons} comparisons: {tests} speed tests in the session"
    shared += f", {len(limits)} judged arms in this one." if options.comparisons is None else ", as the test asks."
    (table,) = run.tables
    return Benchmark(stats, replace(run, tables=(replace(table, note=table.note + shared),)), records)


def measure_benchmark(arms: Mapping[str, Step], options: SpeedTestOptions, *, name: str) -> Benchmark:
    """Measure the arms until their ratios are known to `options.width`, without a verdict."""
    budget, clock, seed, width = options.budget or BUDGET, options.clock, options.seed, options.width
    subject, device = options.subject or name, options.device
    stats = measure_speed(arms, subject=subject, device=device, budget=budget, width=width, clock=clock, seed=seed)
    records = tuple(record_of(stats, arm.name, name=name, precision=options.precision) for arm in stats.compared)
    return Benchmark(stats, speed_run(stats), records)


def skip_benchmark(
    arms: Mapping[str, Step], options: SpeedTestOptions, *, name: str, reason: str, judged: bool = True
) -> Run:
    """Call each arm once without measuring: SKIP for each. An exception of an arm passes. judged: there are limits."""
    PairedMeasurement(arms, device=options.device, clock=options.clock)  # raises for wrong arms and devices
    limits: Mapping[str, float | None] = dict.fromkeys(list(arms)[1:])
    if judged:
        limits = limits_of(arms, options.at_least)
    for step in arms.values():
        step()
    reference = next(iter(arms))
    findings = []
    for arm, limit in limits.items():
        clause = f"{arm} is compared with {reference}" if limit is None else requirement(arm, limit, reference)
        message = f"nothing was measured, each arm was called once: {reason}; {clause}"
        hint = "run the speed tests in a session of their own: pytest --benchmark-only, without -n"
        findings.append(SPEEDUP.skip(options.subject or name, message, where=WHERE, limit=limit, hint=hint))
    return Run(findings=tuple(findings), coverage=Coverage({"paired cycles": 0}, {reason: len(findings)}))
