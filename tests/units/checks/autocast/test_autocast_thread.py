"""The check autocast-thread, on records."""

from __future__ import annotations

from ampcheck.checks.autocast.autocast_thread import check
from ampcheck.core.run import Verdict
from ampcheck.records.autocast import State
from checks.autocast.records import LIMITS, OFF, PLACE, block, call


def test_a_thread_that_computes_otherwise_than_the_one_that_started_it() -> None:
    (found,) = check(block(call("thread", "float32", now=OFF), call("thread", now=OFF)), LIMITS)
    assert (found.verdict, found.where, found.observed) == (Verdict.FAIL, PLACE, 2)
    assert "ran on float32 with autocast off (and 1 other places)" in found.message
    (other,) = check(block(call("thread", "float32", now=State("cpu", "bfloat16"))), LIMITS)
    assert "with autocast to bfloat16, the default" in other.message


def test_threads_whose_ops_are_as_they_should_pass() -> None:
    (clean,) = check(block(counts={"thread ops": 2}), LIMITS)
    assert (clean.verdict, clean.seen) == (Verdict.PASS, 2)
    assert next(check(block(), LIMITS)).verdict is Verdict.SKIP
