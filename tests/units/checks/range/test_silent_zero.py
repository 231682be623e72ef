"""The check silent-zero, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.core.run import Verdict
from ampcheck.records import faults
from checks.range.records import (
    FAULT,
    HEALTHY,
    LOSSY,
    found,
    run_verdicts,
    site,
    verdicts,
)

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_values_that_vanish_fail_where_they_reach_a_result_only() -> None:
    for kind, check in ((faults.FLUSH, "flush"), (faults.ZERO, "silent-zero")):
        fault = replace(FAULT, kind=kind, examination=replace(LOSSY, zeroed=6, flushed=1.0))
        assert run_verdicts(replace(HEALTHY, faults=(fault,)), check) == [Verdict.FAIL]
        assert run_verdicts(replace(HEALTHY, faults=(replace(fault, reaches={}),)), check) == [Verdict.PASS]


@pytest.mark.parametrize(("phase", "verdict"), [("backward", FAIL), ("forward", WARN)])
def test_a_cast_that_makes_everything_zero_in_every_call_is_a_silent_zero(phase: str, verdict: Verdict) -> None:
    empty = site(1, phase, flushed=1000, emptied=10, amax=1e-9, smallest=1e-10, lost=1.0)

    (finding,) = found("silent-zero", site(), empty)

    assert finding.verdict is verdict
    assert finding.where.phase == phase
    assert not [one for one in found("flush", site(), empty) if one.verdict is not PASS], "it is told once"


def test_a_cast_that_made_everything_zero_in_some_calls_is_none() -> None:
    assert verdicts("silent-zero", site(0, flushed=500, emptied=5)) == [PASS]
