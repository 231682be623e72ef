"""The check headroom, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.core.run import Finding, Verdict
from checks.range.records import (
    HEALTHY,
    PLACE,
    run_findings,
    site,
    verdicts,
)

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_headroom_is_growth_and_no_mask_that_passes_through() -> None:
    def verdict(result: float, source: float, phase: str = "forward") -> Finding:
        place = replace(PLACE, phase=phase)
        stats = replace(HEALTHY, largest={(place, "float16"): (result, source)}, scale=65536.0)
        (finding,) = run_findings(stats, "headroom")
        return finding

    assert verdict(30000.0, 100.0).verdict is Verdict.WARN
    assert verdict(60000.0, 30000.0).verdict is Verdict.WARN
    assert verdict(65504.0, 65504.0).verdict is Verdict.PASS
    assert verdict(30000.0, 100.0, "backward").verdict is not Verdict.WARN
    slow = verdict(33000.0, 30000.0)  # what grew before is reported where it grew, and is the maximum all the same
    assert (slow.verdict, slow.observed) == (Verdict.PASS, pytest.approx(65504 / 33000))


@pytest.mark.parametrize(("amax", "verdict"), [(65504 / 4, PASS), (65504 / 3.9, WARN)])
def test_headroom_warns_within_a_factor_of_the_end_of_the_format(amax: float, verdict: Verdict) -> None:
    assert verdicts("headroom", site(0, amax=amax)) == [verdict]


def test_gradients_near_the_end_are_where_a_loss_scale_holds_them() -> None:
    assert verdicts("headroom", site(), site(1, "backward", amax=60000.0)) == [PASS]
