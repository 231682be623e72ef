"""The check flush, on records."""

from __future__ import annotations

from ampcheck.core.run import Verdict
from checks.range.records import (
    found,
    site,
    verdicts,
)

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_a_flush_warns_from_where_it_loses_more_of_the_norm_than_a_rounding() -> None:
    roundoff = 2.0**-11

    assert verdicts("flush", site(0, flushed=100, lost=0.99 * roundoff)) == [PASS]
    (finding,) = found("flush", site(0, flushed=100, lost=1.01 * roundoff))
    assert finding.verdict is WARN
    assert (finding.observed, finding.limit) == (1.01 * roundoff, roundoff)
