"""The check autocast-checkpoint, on records."""

from __future__ import annotations

from ampcheck.checks.autocast.autocast_checkpoint import check
from ampcheck.core.run import Verdict
from ampcheck.records.autocast import Recompute
from checks.autocast.records import HALF, LIMITS, OFF, PLACE, block


def test_a_forward_that_is_computed_again_in_another_state() -> None:
    again = Recompute("aten::mm", HALF, OFF, ("float16",), ("float32",), PLACE)
    (found,) = check(block(recomputed={again: 1}), LIMITS)
    assert (found.verdict, found.where, found.observed) == (Verdict.FAIL, PLACE, 1)
    assert "float16 with autocast float16 on cpu in forward and on float32 with autocast off on cpu" in found.message
    (refused,) = check(block(recomputed={Recompute("", HALF, OFF, (), (), PLACE): 1}), LIMITS)
    assert "but it ran on autocast float16 on cpu in forward" in refused.message


def test_recomputed_ops_that_are_as_before_pass() -> None:
    (clean,) = check(block(counts={"recomputed ops": 2}), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 2)
    assert next(check(block(), LIMITS)).verdict is Verdict.SKIP
