"""The check scale-invariance, on records."""

from __future__ import annotations

from typing import Any

from ampcheck.checks.training.scale_invariance import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.invariance import RETURNED, Dependence, InvarianceStats


def judged(*found: Dependence, gradients: int = 4, **facts: Any) -> Finding:
    return check(InvarianceStats("loop", gradients, found, **facts), Limits())[0]


def test_a_gradient_that_depends_on_the_scale_says_how() -> None:
    clipped = Dependence("the gradient of up.weight", "up.weight", 1, (1.0,), ("t.py", 7))
    found = judged(clipped)
    assert (found.verdict, found.where.module, found.where.line, found.observed) == (Verdict.FAIL, "up", 7, 1.0)
    assert found.message.endswith("the gradient of up.weight is multiplied by the scale")
    summed = judged(Dependence("it", "", 1, (), ("t.py", 7)), penalty="t.py:5")
    assert (summed.kind, "gives of a scaled loss (t.py:5)" in summed.hint) == ("penalty", True)
    assert "is a sum of parts that depend on it in different ways" in summed.message
    returned = judged(Dependence(RETURNED, "", 1, (-2.0,), ("t.py", 9)))
    assert (returned.kind, "divided by the scale to the power of 2" in returned.message) == ("returned", True)


def test_equal_gradients_pass_and_what_was_not_seen_is_incomplete_where_something_can_be_changed() -> None:
    assert (judged().verdict, judged().seen) == (Verdict.PASS, 4)
    assert judged(skipped="no GradScaler is in use").verdict is Verdict.SKIP
    unseen = judged(skipped="a number was read", place=("t.py", 3), hint="unscale first")
    assert (unseen.verdict, unseen.where.line) == (Verdict.INCOMPLETE, 3)
