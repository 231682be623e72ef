"""The check autocast-function, on records."""

from __future__ import annotations

from ampcheck.checks.autocast.autocast_function import check
from ampcheck.core.run import Verdict
from checks.autocast.records import LIMITS, OFF, block, call


def test_a_backward_in_another_state_than_its_forward() -> None:
    (mixed,) = check(block(call("function", "float16", "float32", now=OFF)), LIMITS)
    assert mixed.verdict is Verdict.FAIL
    assert "ran on float16 and float32 with autocast off; forward ran with float16 on cpu" in mixed.message
    (wide,) = check(block(call("function", "float32", now=OFF)), LIMITS)
    assert (wide.verdict, "speed is lost" in wide.message) == (Verdict.WARN, True)


def test_a_backward_that_casts_by_itself_passes() -> None:
    (clean,) = check(block(call("function", "float32", casts=True), counts={"Function ops": 1}), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 1)
    assert next(check(block(), LIMITS)).verdict is Verdict.SKIP
