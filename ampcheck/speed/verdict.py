"""PASS, FAIL or UNDECIDED on paired times, with an error rate that applies to a whole suite. No torch runs here.

The requirement is `ratio >= limit`; a shortfall below the minimum effect does not count.

- FAIL: the whole interval is below the limit *and* the median is below limit / (1 + effect).
- PASS: the whole interval is above limit / (1 + effect).
- UNDECIDED: anything else.

The interval covers chance. Systematic differences show in the A/A twin of the reference. Where its interval reaches
further from 1 than the minimum effect, a failure has to be larger than the twin's own ratio, a pass has to be clear of
all that interval, the noise, and an arm that is then undecided is "not comparable".

The interval's confidence is `1 - 2 * false_alarms / (comparisons * looks)`: of all comparisons of a suite, each judged
several times while it runs, together at most `false_alarms` fail without a cause (Bonferroni's inequality, which
needs no independence).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampcheck.catalog.speed import SPEEDUP
from ampcheck.core.arguments import parse_integer, parse_number
from ampcheck.core.check import Evidence
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.core.text import counted
from ampcheck.speed.stats import LOOKS, ArmTimes, Ratio, SpeedRecord, SpeedStats

Logs: TypeAlias = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000


def log_ratios(reference: ArmTimes, arm: ArmTimes) -> Logs:
    """log(reference / arm) of each cycle, float64 [cycles]; above 0 the arm is faster."""
    logs: Logs = np.log(np.asarray(reference.seconds) / np.asarray(arm.seconds))
    return logs


def paired_ratio(reference: ArmTimes, arm: ArmTimes) -> Ratio:
    """How many times faster `arm` is, with a percentile bootstrap interval of the median at 95 per cent."""
    logs = log_ratios(reference, arm)
    low, high = bootstrapped(np.median, logs)
    return Ratio(
        median=math.exp(np.median(logs)),
        low=math.exp(low),
        high=math.exp(high),
        confidence=CONFIDENCE,
        p05=math.exp(np.quantile(logs, 0.05)),
        minimum=math.exp(logs.min()),
        cycles=len(logs),
    )


def median_bounds(logs: Logs, confidence: float) -> tuple[float, float]:
    """The interval of the median of log-ratios; infinite where there are too few for this confidence.

    From order statistics (the sign test inverted), it is exact for every distribution, heavy tails included, and at
    confidences such as 0.9999, whose tail no affordable number of resamples resolves.
    """
    count, ordered = len(logs), np.sort(logs)
    outside = int(Fraction((1 - confidence) / 2) * 2**count)  # of the 2^n signs around the median, on each side
    index, signs, more = -1, 0, 1  # more: how many have index + 1 values below the median, a binomial coefficient
    while signs + more <= outside:
        index, signs = index + 1, signs + more
        more = more * (count - index) // (index + 1)
    return (-math.inf, math.inf) if index < 0 else (float(ordered[index]), float(ordered[count - 1 - index]))


def cycles_needed(confidence: float) -> int:
    """How many cycles the exact interval needs to be finite."""
    return max(1, math.ceil(math.log2(2 / (1 - confidence))))


def bootstrapped(
    statistic: Callable[..., Any], *samples: Logs, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The percentile interval at 95 per cent of a statistic of samples, float64 [cycles], whose cycles correspond."""
    if len(samples[0]) < 2:
        return -math.inf, math.inf
    count = len(samples[0])
    drawn = np.random.default_rng(seed).integers(0, count, (resamples, count))
    values = statistic(*(sample[drawn] for sample in samples), axis=-1)
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


WHERE = Where(phase="speed")

_LONGEST = 3600
"""Seconds of a budget that a hint may advise."""

EFFECT = 0.03
"""The smallest change that fails, as a share: above what the layout of memory alone does to a time."""

NOISE, STRADDLES = "noise", "straddles"

FALSE_ALARMS = 0.01
"""How often a suite without any change may fail, at most."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The requirement on a ratio.

    limit: the least ratio. effect: the smallest shortfall that counts. comparisons: of the whole suite.
    """

    limit: float = 1.0
    effect: float = EFFECT
    comparisons: int = 1
    false_alarms: float = FALSE_ALARMS

    def __post_init__(self) -> None:
        parse_number(self.limit, "at_least")
        parse_number(self.effect, "effect", below=1)
        parse_integer(self.comparisons, "comparisons")
        parse_number(self.false_alarms, "false_alarms", below=1)

    @property
    def confidence(self) -> float:
        """The confidence of each comparison's interval at which the suite's false alarms stay below `false_alarms`."""
        return 1 - 2 * self.false_alarms / (self.comparisons * len(LOOKS))

    @property
    def floor(self) -> float:
        """The ratio below which a shortfall matters."""
        return self.limit / (1 + self.effect)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict on one arm, its exact interval, and the reason where it is undecided (`NOISE` or `STRADDLES`)."""

    verdict: Verdict
    ratio: float
    low: float
    high: float
    reason: str = ""


def decide(logs: Logs, twin: Logs, rule: Rule) -> Decision:
    """Judge the log-ratios of one arm, given those of the reference's twin, float64 [cycles] each."""
    low, high = (math.exp(bound) for bound in median_bounds(logs, rule.confidence))
    bias = math.expm1(abs(np.median(twin)))
    return conclude(math.exp(np.median(logs)), low, high, rule, noise=aa_noise(twin), bias=bias)


def conclude(ratio: float, low: float, high: float, rule: Rule, *, noise: float, bias: float) -> Decision:
    """The verdict on a ratio with its interval at the rule's confidence.

    noise: how far the interval of the reference's twin reaches from 1, as a share; bias: how far its ratio itself is.
    """
    noisy = noise > rule.effect
    slack = 1 + bias if noisy else 1.0
    if high * slack < rule.limit and ratio * slack < rule.floor:
        return Decision(Verdict.FAIL, ratio, low, high)
    if low > rule.floor * (1 + noise if noisy else 1.0):
        return Decision(Verdict.PASS, ratio, low, high)
    return Decision(Verdict.UNDECIDED, ratio, low, high, NOISE if noisy else STRADDLES)


def aa_noise(twin: Logs) -> float:
    """How far the twin's 95 per cent interval reaches from 1, as a share."""
    low, high = (math.exp(bound) for bound in median_bounds(twin, CONFIDENCE))
    return max(1 - low, high - 1)


def check_speed(stats: SpeedStats, rules: Mapping[str, Rule] | Rule | None = None) -> list[Finding]:
    """One finding for each arm that is compared with the reference, or for those that `rules` names.

    rules: the requirement on each arm; one `Rule` for all; by default no arm may be slower than the reference.
    """
    return [_judged(stats, arm, rule) for arm, rule in _rules(stats, rules)]


def is_decided(stats: SpeedStats, rules: Mapping[str, Rule] | Rule | None = None) -> bool:
    """Whether more measurement would change no verdict: each is PASS or FAIL."""
    return all(_decided(stats, arm, rule).verdict is not Verdict.UNDECIDED for arm, rule in _rules(stats, rules))


def _rules(stats: SpeedStats, rules: Mapping[str, Rule] | Rule | None) -> list[tuple[ArmTimes, Rule]]:
    if not isinstance(rules, Mapping):
        rule = rules or Rule(comparisons=max(1, len(stats.compared)))
        return [(arm, rule) for arm in stats.compared]
    judged = [(stats.arm(name), rule) for name, rule in rules.items()]
    if not judged or not all(arm in stats.compared for arm, _ in judged):
        named = ", ".join(arm.name for arm in stats.compared)
        raise UsageError(f"rules name at least one arm other than the reference and its twin; there are {named}")
    return judged


def limits_of(arms: object, at_least: object) -> dict[str, float]:
    """The least ratio of each arm that is judged, before anything runs.

    arms: a mapping whose first name is the reference. at_least: one ratio for all others, or one for some by name.
    Raises `UsageError` where no arm would be judged, one is not there, or a limit is no number above 0.
    """
    names = list(arms)[1:] if isinstance(arms, Mapping) else []
    limits: dict[str, object] = dict(at_least) if isinstance(at_least, Mapping) else dict.fromkeys(names, at_least)
    if wrong := [name for name in limits if name not in names]:
        raise UsageError(
            f"at_least names {wrong[0]!r}, which is no arm after the reference; there are {', '.join(names)}"
        )
    if names and not limits:
        raise UsageError(f"at_least names no arm to judge; there are {', '.join(names)}")
    return {name: parse_number(limit, "at_least") for name, limit in limits.items()}


def _decided(stats: SpeedStats, arm: ArmTimes, rule: Rule) -> Decision:
    return decide(log_ratios(stats.reference, arm), log_ratios(stats.reference, stats.twin), rule)


def _judged(stats: SpeedStats, arm: ArmTimes, rule: Rule) -> Finding:
    decision, needed, reference = _decided(stats, arm, rule), cycles_needed(rule.confidence), stats.reference.name
    required = requirement(arm.name, rule.limit, reference)
    observed = f"it is {show_ratio(decision, rule)}, in {stats.cycles:,} paired cycles"
    observed += f"; its first call took {arm.first:.0f} s" if arm.first >= 1 else ""
    if stats.threads is not None and stats.threads.fewer:
        observed += f"; it {stats.threads.fewer}"
    message = explain(decision, rule, required, observed, reference, aa_noise(log_ratios(stats.reference, stats.twin)))
    budget = _budget(stats, decision, rule)
    hint = {
        NOISE: f"{budget}, leave other work off this machine, or use a larger minimum effect",
        STRADDLES: f"{budget}, or leave other work off this machine",
        "": "torch.profiler shows where the time goes; of compiled code look at graph breaks and recompilations "
        "first (ampcheck.assert_compiled)",
    }[decision.reason]
    if stats.cycles < needed:
        few = f"{counted(stats.cycles, 'cycles')} {'is' if stats.cycles == 1 else 'are'} too few"
        message = f"{required}; {few}, {needed} are needed"
        hint = f"{budget}, or let one step do less work"
    if decision.verdict is Verdict.UNDECIDED and stats.threads is not None and stats.threads.crowded:
        message += f"; {stats.threads.crowded}"
        hint += "; OMP_NUM_THREADS=1 leaves a core to the other processes" if stats.threads.used > 1 else ""
    evidence = Evidence(where=WHERE, observed=decision.ratio, limit=rule.limit, hint=hint)
    return SPEEDUP.judged(decision.verdict, stats.subject, message, stats.cycles, **evidence)


def _budget(stats: SpeedStats, decision: Decision, rule: Rule) -> str:
    """The advice on the budget: with which the arm would be decided, the noise and the ratio staying as they are."""
    cycles = cycles_needed(rule.confidence)
    if decision.verdict is not Verdict.UNDECIDED or not stats.spent:
        return "raise the budget"
    if stats.cycles >= cycles:
        # The interval shrinks with the root of the cycles, and has to leave out the floor, or the limit. A ratio that
        # may be the limit is taken for it; twice as many cycles leave room for chance.
        ratio, low, high = (math.log(value) for value in (decision.ratio, decision.low, decision.high))
        limit, floor = math.log(rule.limit), math.log(rule.floor)
        ratio = limit if low <= limit <= high else ratio
        share = (high - low) / 2 / (ratio - floor if ratio > floor else limit - ratio)
        cycles = round(min(2 * stats.cycles * max(share, 1.0) ** 2, 1e12))
    seconds = math.ceil(1.2 * cycles * stats.spent / stats.cycles)
    if seconds > _LONGEST:
        return "raise the budget: the ratio is so near the limit that it would take more than an hour"
    return f"raise the budget (--budget {seconds}: about as many seconds are needed, and {stats.spent:.2g} were spent)"


def show_ratio(decision: Decision, rule: Rule) -> str:
    """A ratio with its interval."""
    interval = f"{decision.low:.4g} to {decision.high:.4g} at {percent(rule.confidence)} confidence"
    return f"{decision.ratio:.4g} times as fast, {interval}"


def explain(decision: Decision, rule: Rule, required: str, observed: str, reference: str, noise: float) -> str:
    """The message of a decision. noise: by what share the reference and its own twin differ."""
    if decision.reason == NOISE:
        twins = f"{reference} and its own twin differ by up to {100 * noise:.2g} %"
        return f"not comparable: {twins}, more than the minimum effect of {percent(rule.effect)}; {observed}"
    if decision.reason == STRADDLES:
        return f"{required}; {observed}: too wide to decide, or between {rule.floor:.4g} and {rule.limit:.4g}"
    message = f"{required}, shortfalls below {percent(rule.effect)} not counted; {observed}"
    if decision.verdict is Verdict.PASS and noise > rule.effect:
        message += f", which is clear of the noise of {100 * noise:.2g} % between {reference} and its twin"
    return message


def record_of(stats: SpeedStats, arm: str, *, name: str, precision: str = "float32", verdict: str = "") -> SpeedRecord:
    """The record of one arm."""
    times = stats.arm(arm)
    ratio = asdict(paired_ratio(stats.reference, times))
    return SpeedRecord(
        name=name,
        reference=stats.reference.name,
        arm=arm,
        ratio=ratio.pop("median"),
        **ratio,
        noise=aa_noise(log_ratios(stats.reference, stats.twin)),
        precision=precision,
        reference_seconds=stats.reference.median,
        arm_seconds=times.median,
        verdict=verdict,
        fingerprint=stats.fingerprint,
    )


def whose_fault(
    reference: Decision, arm: Decision, rule: Rule, *, names: tuple[str, str] = ("eager", "compiled")
) -> str:
    """Why the ratio of two arms changed between base and head, as `compiled is 8 % slower, eager unchanged`.

    reference, arm: head against base of each, above 1 where head is faster. An arm changed where it differs by more
    than the rule's effect and its interval leaves out 1; it is unchanged where it cannot differ by more, and else
    undecided. "" where neither changed.
    """
    changes = dict(zip(names, (_change(reference, rule), _change(arm, rule)), strict=True))
    changed = [f"{name} is {changes[name]}" for name in names[::-1] if changes[name] not in _NO_CHANGE]
    rest = [f"{name} {changes[name]}" for name in names if changes[name] in _NO_CHANGE]
    return ", ".join((" and ".join(changed), *rest)) if changed else ""


_NO_CHANGE = ("unchanged", "undecided")


def _change(decision: Decision, rule: Rule) -> str:
    """`8 % slower`, `unchanged` or `undecided`. Slower by 8 % takes 8 % longer."""
    effect = math.log1p(rule.effect)
    if decision.reason == NOISE:
        return "undecided"
    if (decision.high < 1 or decision.low > 1) and abs(math.log(decision.ratio)) > effect:
        share = math.exp(abs(math.log(decision.ratio))) - 1
        return f"{100 * share:.2g} % {'faster' if decision.ratio > 1 else 'slower'}"
    within = decision.low > 0 and math.log(decision.low) > -effect and math.log(decision.high) < effect
    return "unchanged" if within else "undecided"


def requirement(arm: str, limit: float, reference: str) -> str:
    """The requirement, as the beginning of a sentence."""
    if limit == 1:
        return f"{arm} must be no slower than {reference}"
    return f"{arm} must be at least {limit:.4g} times as fast as {reference}"


def percent(share: float) -> str:
    """A share, in four digits."""
    return f"{100 * share:.4g} %"
