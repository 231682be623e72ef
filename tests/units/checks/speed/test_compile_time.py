"""The check compile-time, on records."""

from __future__ import annotations

import math

import pytest

from ampcheck.checks.speed.compile_time import check
from ampcheck.core.limits import StartupLimits
from ampcheck.core.run import Verdict
from ampcheck.records.startup import BreakEven, CompileCost

THREE = CompileCost("model", (9.0, 10.0, 11.0), (9.0, 11.0))


@pytest.mark.parametrize(("limit", "verdict"), [(12, Verdict.PASS), (10, Verdict.UNDECIDED), (8, Verdict.FAIL)])
def test_seconds_are_judged_by_the_range_of_launches(limit: float, verdict: Verdict) -> None:
    (found,) = check(THREE, StartupLimits(compile=limit))
    assert (found.verdict, found.observed, found.unit) == (verdict, 10.0, "s")
    (few,) = check(CompileCost("model", (10.0,), (7.0, 13.0)), StartupLimits(compile=5))
    assert (few.verdict, "fewer than 3 launches decide nothing" in few.message) == (Verdict.UNDECIDED, True)


def test_calls_are_judged_by_the_break_even_and_nothing_without_limits() -> None:
    limits = StartupLimits(calls=1000)
    for low, high, verdict in ((400, 600, Verdict.PASS), (900, 1100, Verdict.UNDECIDED), (2000, 3000, Verdict.FAIL)):
        paid = BreakEven((low + high) / 2, low, high, 10.0, 0.01)
        (found,) = check(CompileCost("model", THREE.costs, THREE.range, paid), limits)
        assert (found.verdict, found.limit, found.unit) == (verdict, 1000, "calls")
    never = BreakEven(math.inf, math.inf, math.inf, 10.0, -0.01)
    (found,) = check(CompileCost("model", (10.0,), (7.0, 13.0), never), limits)
    assert (found.verdict, "it never has" in found.message) == (Verdict.FAIL, True)
    (untimed,) = check(THREE, limits)
    assert untimed.verdict is Verdict.SKIP
    assert list(check(THREE, StartupLimits())) == []
