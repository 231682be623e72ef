"""The check gradient-underflow, on records."""

from __future__ import annotations

from typing import Any

from ampcheck.checks.training.gradient_underflow import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.gradients import GradientLoss, GradientStats, Underflow


def loss(zero: int, name: str = "up.weight", **facts: Any) -> GradientLoss:
    return GradientLoss(name, "float16", "float16", 200, 100, zero, **facts)


def judged(*gradients: GradientLoss, **facts: Any) -> Finding:
    (found,) = check(GradientStats("loop", 0, "float16", gradients=gradients, **facts), Limits())
    return found


def test_a_parameter_that_loses_more_than_a_tenth_fails() -> None:
    found = judged(loss(30), loss(20, "down.weight"))
    assert (found.verdict, found.observed, found.limit, found.where.module) == (Verdict.FAIL, 0.3, 0.1, "up")
    assert "30.0% of the gradient of up.weight did (30 of 100 elements" in found.message
    assert "also down.weight 20.0%" in found.message
    assert found.hint.startswith("scale the loss")
    kept = judged(loss(5))
    assert (kept.verdict, kept.seen, kept.observed) == (Verdict.PASS, 1, 0.05)


def test_gradients_that_are_counted_only_warn_and_what_another_scale_saves_fails() -> None:
    counted = judged(loss(30, marks=", and the rest ends abruptly"), counted="each tenth step")
    assert (counted.verdict, "ampcheck.audit compares" in counted.hint) == (Verdict.WARN, True)
    damage = judged(loss(5), underflow=Underflow(0.4, 1024.0, 0.01))
    assert (damage.verdict, damage.observed, damage.unit) == (Verdict.FAIL, 0.4, "share of the norm")
    assert "off by 40.0% of their norm" in damage.message


def test_what_was_not_compared_is_incomplete() -> None:
    assert judged(skipped="no backward pass").message == "not judged: no backward pass"
    assert "no parameter was given a gradient" in judged().message
    assert "no gradient is nonzero in float64" in judged(GradientLoss("w")).message
    assert judged(loss(0, nonfinite=200)).verdict is Verdict.SKIP
