"""Speed, start-up and memory: the words that the checks of times share."""

from __future__ import annotations

import math

from ampcheck.core.run import Verdict, Where
from ampcheck.records.speed import NOISE, STRADDLES, Decision, Rule

WHERE = Where(phase="speed")


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


def percent_of(factor: float) -> float:
    """By how many per cent a factor changes a value."""
    return 100 * (factor - 1)
