"""The check optimizer-state, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.checks.dtype.optimizer_state import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.state import DtypePolicy, Role, VanishedState
from checks.dtype.records import state, tensor

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP
FULL = ("float32",)


GONE = VanishedState("weight.exp_avg_sq", "float16", 4, 2, excess=3.0, largest=40.0, step=1, foreseen=False)


def test_state_is_judged_by_its_policy_and_reported_without_one() -> None:
    low = tensor(Role.STATE, "bfloat16", "weight.exp_avg")
    assert [f.verdict for f in check(state(low), Limits())] == [SKIP]
    assert [f.verdict for f in check(state(low, policy=DtypePolicy(state=FULL)), Limits())] == [FAIL]
    assert [f.verdict for f in check(state(tensor(Role.STATE)), Limits())] == [PASS]
    assert [f.verdict for f in check(state(), Limits())] == [SKIP]


def test_state_that_vanished_in_a_denominator_fails_whatever_is_declared() -> None:
    low = tensor(Role.STATE, "float16", "weight.exp_avg_sq")
    (finding,) = check(state(low, vanished=(GONE,)), Limits())
    assert (finding.verdict, finding.observed, finding.where.step) == (FAIL, 0.5, 1)
    assert "their updates were up to 40 times too large" in finding.message
    assert [f.verdict for f in check(state(low, vanished=(replace(GONE, excess=0.1),)), Limits())] == [SKIP]
