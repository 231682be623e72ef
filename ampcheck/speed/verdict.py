"""PASS, FAIL or UNDECIDED on paired times, with an error rate that holds for a whole suite. No torch runs here.

The requirement is `ratio >= limit`; what lies less than the minimum effect below it is nobody's concern.

- FAIL: the whole interval lies below the limit *and* the median lies below limit / (1 + effect).
- PASS: the whole interval lies above limit / (1 + effect).
- UNDECIDED: anything else.

The interval answers for chance. For what chance does not explain there is the A/A twin of the reference: where its
interval reaches further from 1 than the minimum effect, the twin's own ratio is taken off on both sides, and what is
then undecided is "not comparable".

The interval's confidence is `1 - 2 * false_alarms / (comparisons * looks)`: of all comparisons of a suite, each looked
at several times while it ran, together at most `false_alarms` fail without a cause (Bonferroni's inequality, which
asks for no independence).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Scalar, Verdict, Where, passed
from ampcheck.speed.fingerprint import differences
from ampcheck.speed.interval import CONFIDENCE, Logs, cycles_needed, log_ratios, median_bounds, paired_ratio
from ampcheck.speed.stats import LOOKS, ArmTimes, SpeedRecord, SpeedStats

EFFECT = 0.03
"""The smallest change that is worth a failure, as a share: above what the layout of memory alone does to a time."""

NOISE, STRADDLES = "noise", "straddles"

FALSE_ALARMS = 0.01
"""How often a suite without any change may fail, at most."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is required of a ratio. limit: at least. effect: the least that matters. comparisons: of the whole suite."""

    limit: float = 1.0
    effect: float = EFFECT
    comparisons: int = 1
    false_alarms: float = FALSE_ALARMS

    def __post_init__(self) -> None:
        for name in ("limit", "effect", "comparisons", "false_alarms"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UsageError(f"{name} of a rule is a number; found {value!r}")
        if not (self.limit > 0 and math.isfinite(self.limit)):
            raise UsageError(f"the least ratio is a positive number, such as 1.2; found {self.limit!r}")
        if not 0 < self.effect < 1:
            raise UsageError(f"the minimum effect is a share between 0 and 1, such as 0.03; found {self.effect!r}")
        if self.comparisons < 1 or not 0 < self.false_alarms < 1:
            raise UsageError(
                "comparisons is at least 1 and false_alarms a share between 0 and 1; "
                f"found {self.comparisons!r} and {self.false_alarms!r}"
            )

    @property
    def confidence(self) -> float:
        """Of each comparison's interval, so that the suite's false alarms stay below `false_alarms`."""
        return 1 - 2 * self.false_alarms / (self.comparisons * len(LOOKS))

    @property
    def floor(self) -> float:
        """The ratio below which a shortfall matters."""
        return self.limit / (1 + self.effect)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict on one arm, the exact interval it rests on, and why nothing was decided (`NOISE` or `STRADDLES`)."""

    verdict: Verdict
    ratio: float
    low: float
    high: float
    reason: str = ""


def decide(logs: Logs, twin: Logs, rule: Rule) -> Decision:
    """Judge log-ratios of one arm beside those of the reference's twin, float64 [cycles] each."""
    low, high = (math.exp(bound) for bound in median_bounds(logs, rule.confidence))
    bias = math.expm1(abs(np.median(twin)))
    return conclude(math.exp(np.median(logs)), low, high, rule, noise=aa_noise(twin), bias=bias)


def conclude(found: float, low: float, high: float, rule: Rule, *, noise: float, bias: float) -> Decision:
    """The verdict on a ratio with its interval at the rule's confidence.

    noise: how far the interval of the reference's twin reaches from 1, as a share; bias: how far its ratio itself is.
    """
    noisy = noise > rule.effect
    slack = 1 + bias if noisy else 1.0
    if high * slack < rule.limit and found * slack < rule.floor:
        return Decision(Verdict.FAIL, found, low, high)
    if low > rule.floor * slack:
        return Decision(Verdict.PASS, found, low, high)
    return Decision(Verdict.UNDECIDED, found, low, high, NOISE if noisy else STRADDLES)


def aa_noise(twin: Logs) -> float:
    """How far the twin's 95 per cent interval reaches from 1, as a share: what is no difference at all, here, now."""
    low, high = (math.exp(bound) for bound in median_bounds(twin, CONFIDENCE))
    return max(1 - low, high - 1)


def check_speed(
    stats: SpeedStats,
    rules: Mapping[str, Rule] | Rule | None = None,
    *,
    check: str = "speedup",
    against: Mapping[str, Scalar] | None = None,
) -> list[Finding]:
    """One finding for each arm beside the reference and its twin, or for those that `rules` names.

    rules: what each arm must reach; one `Rule` for all; by default no arm may be slower than the reference.
    against: the fingerprint under which `rules` were set; on other hardware or versions nothing is comparable.
    """
    if isinstance(rules, Mapping):
        asked = {stats.arm(name).name: rule for name, rule in rules.items()}
        if not asked or not set(asked) <= {arm.name for arm in stats.compared}:
            named = ", ".join(arm.name for arm in stats.compared)
            raise UsageError(f"rules name at least one arm beside the reference and its twin; there are {named}")
    else:
        rule = rules or Rule(comparisons=max(1, len(stats.compared)))
        asked = {arm.name: rule for arm in stats.compared}
    other = [] if against is None else differences(against, stats.fingerprint)
    return [_finding(stats, stats.arm(name), rule, check, other) for name, rule in asked.items()]


def limits_of(arms: object, at_least: object) -> dict[str, float]:
    """What each arm that is judged must reach, before anything runs.

    arms: a mapping whose first name is the reference. at_least: one ratio for all others, or one for some by name.
    Raises `UsageError` where no arm would be judged, one is not there, or a limit is no number.
    """
    names = list(arms)[1:] if isinstance(arms, Mapping) else []
    limits: dict[str, object] = dict(at_least) if isinstance(at_least, Mapping) else dict.fromkeys(names, at_least)
    if wrong := [name for name in limits if name not in names]:
        raise UsageError(
            f"at_least names {wrong[0]!r}, which is no arm beside the reference; there are {', '.join(names)}"
        )
    if names and not limits:
        raise UsageError(f"at_least names no arm to judge; there are {', '.join(names)}")
    found: dict[str, float] = {}
    for name, limit in limits.items():
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            raise UsageError(f"at_least is a number, or one for each arm; found {limit!r}")
        found[name] = float(limit)
    return found


def is_decided(stats: SpeedStats, rules: Mapping[str, Rule] | Rule | None = None) -> bool:
    """Whether more measurement would change no verdict: each is PASS or FAIL."""
    return all(finding.verdict is not Verdict.UNDECIDED for finding in check_speed(stats, rules))


def _finding(stats: SpeedStats, arm: ArmTimes, rule: Rule, check: str, other: list[str]) -> Finding:
    twin = log_ratios(stats.reference, stats.twin)
    found = decide(log_ratios(stats.reference, arm), twin, rule)
    required = requirement(arm.name, rule.limit, stats.reference.name)
    seen = (
        f"it is {found.ratio:.4g} times as fast, {_interval(found.low, found.high)} at {_percent(rule.confidence)} "
        f"confidence, in {stats.cycles:,} paired cycles"
    )
    verdict, hint = found.verdict, ""
    if other:
        verdict = Verdict.UNDECIDED
        message = f"not comparable: the requirement was set elsewhere ({'; '.join(other)}); {seen}"
        hint = "measure base and head in one job (ampcheck speed --base), or set the requirement anew on this machine"
    elif stats.cycles < cycles_needed(rule.confidence):
        cycles = "1 cycle is" if stats.cycles == 1 else f"{stats.cycles} cycles are"
        message = f"{required}; {cycles} too few, {cycles_needed(rule.confidence)} are needed"
        hint = "raise the budget, or let one step do less work"
    elif found.reason == NOISE:
        message = (
            f"not comparable: {stats.reference.name} and its own twin differ by up to {_percent(aa_noise(twin))}, "
            f"more than the minimum effect of {_percent(rule.effect)}; {seen}"
        )
        hint = "raise the budget, leave other work off this machine, or use a larger minimum effect"
    elif found.reason == STRADDLES:
        message = f"{required}; {seen}: too wide to decide, or between {rule.floor:.4g} and {rule.limit:.4g}"
        hint = "raise the budget, or leave other work off this machine"
    else:
        message = f"{required}, shortfalls below {_percent(rule.effect)} not counted; {seen}"
        if verdict is Verdict.FAIL:
            hint = (
                "torch.profiler shows where the time goes; of compiled code look at graph breaks and recompilations "
                "first (ampcheck.assert_graph)"
                if check == "speedup"
                else "look at what the change does in a profile; torch.profiler shows the ops that grew"
            )
    where, unit = Where(phase="speed"), "times as fast"
    if verdict is Verdict.PASS:
        ratio, limit = found.ratio, rule.limit
        return passed(check, stats.subject, message, stats.cycles, where=where, observed=ratio, limit=limit, unit=unit)
    return Finding(check, verdict, stats.subject, message, where, found.ratio, rule.limit, unit, hint, stats.cycles)


def record_of(stats: SpeedStats, arm: str, *, name: str, precision: str = "float32", verdict: str = "") -> SpeedRecord:
    """What is kept of one arm."""
    times = stats.arm(arm)
    ratio = paired_ratio(stats.reference, times)
    return SpeedRecord(
        name=name,
        reference=stats.reference.name,
        arm=arm,
        ratio=ratio.median,
        low=ratio.low,
        high=ratio.high,
        p05=ratio.p05,
        minimum=ratio.minimum,
        noise=aa_noise(log_ratios(stats.reference, stats.twin)),
        cycles=ratio.cycles,
        confidence=ratio.confidence,
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

    reference, arm: head against base of each, above 1 where head is faster. Changed is what differs by more than the
    rule's effect and whose interval leaves out 1; unchanged what cannot differ by more; the rest is undecided, and told
    so. "" where nothing changed.
    """
    shares = [_change(one, rule) for one in (reference, arm)]
    if all(share in ("", "undecided") for share in shares):
        return ""
    told = zip((names[1], names[0]), (shares[1], shares[0]), strict=True)  # the arm first: it is what is judged
    clauses = {name: f"{name} is {share}" if share not in ("", "undecided") else "" for name, share in told}
    changed = " and ".join(clause for clause in clauses.values() if clause)
    rest = [
        f"{name} {share or 'unchanged'}"
        for name, share in zip(names, shares, strict=True)
        if share in ("", "undecided")
    ]
    return ", ".join((changed, *rest))


def _change(found: Decision, rule: Rule) -> str:
    """`8 % slower`, "" for unchanged, or `undecided`. Slower by 8 % takes 8 % longer."""
    effect = math.log1p(rule.effect)
    if found.reason == NOISE:
        return "undecided"
    if (found.high < 1 or found.low > 1) and abs(math.log(found.ratio)) > effect:
        share = math.exp(abs(math.log(found.ratio))) - 1
        return f"{100 * share:.2g} % {'faster' if found.ratio > 1 else 'slower'}"
    within = math.log(found.low) > -effect and math.log(found.high) < effect if found.low > 0 else False
    return "" if within else "undecided"


def requirement(arm: str, limit: float, reference: str) -> str:
    """What is required, as the beginning of a sentence."""
    if limit == 1:
        return f"{arm} must be no slower than {reference}"
    return f"{arm} must be at least {limit:.4g} times as fast as {reference}"


def _interval(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
