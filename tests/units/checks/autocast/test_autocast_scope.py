"""The check autocast-scope, on records."""

from __future__ import annotations

from ampcheck.checks.autocast.autocast_scope import check
from ampcheck.core.run import Verdict, Where
from ampcheck.records.autocast import Crossing
from checks.autocast.records import HALF, LIMITS, block

BACKWARD, UPDATE = Where("backward", file="train.py", line=7), Where("update", file="train.py", line=8)


def test_a_backward_pass_inside_a_region_fails_and_one_that_is_differentiable_warns() -> None:
    crossings = {Crossing("backward calls", False, HALF, 1, BACKWARD): 3}
    (inside,) = check(block(crossings=crossings, regions=1), LIMITS)
    assert (inside.verdict, inside.where, inside.observed, inside.limit) == (Verdict.FAIL, BACKWARD, 3, 0)
    assert "3 ran with autocast float16 on cpu" in inside.message
    (penalty,) = check(block(crossings={Crossing("backward calls", True, HALF, 1, BACKWARD): 1}), LIMITS)
    assert (penalty.verdict, "create_graph" in penalty.message) == (Verdict.WARN, True)


def test_a_region_around_the_loop_is_said_of_its_steps() -> None:
    passes, steps = (
        Crossing(what, False, HALF, 1, where)
        for what, where in (("backward calls", BACKWARD), ("optimizer steps", UPDATE))
    )
    backward, update = check(block(crossings={passes: 2, steps: 2}), LIMITS)
    assert (backward.kind, update.kind) == ("", "region")
    assert "the whole training loop runs inside one region (2 steps)" in update.message


def test_without_crossings_it_passes_or_says_why_nothing_was_judged() -> None:
    ran = {"backward calls": 2, "optimizer steps": 1}
    (clean,) = check(block(counts=ran, regions=1), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 3)
    (never,) = check(block(counts=ran), LIMITS)
    assert (never.verdict, "autocast was never on" in never.message) == (Verdict.SKIP, True)
    (nothing,) = check(block(), LIMITS)
    assert (nothing.verdict, "no backward pass" in nothing.message) == (Verdict.SKIP, True)
    (idle,) = check(block(counts=ran, idle={Where("forward", file="train.py", line=3): "cuda"}), LIMITS)
    assert (idle.verdict, "torch.autocast('cuda') cast nothing" in idle.message) == (Verdict.INCOMPLETE, True)
