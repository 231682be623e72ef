"""The check integer-cast, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.core.run import Verdict
from ampcheck.records import faults
from checks.range.records import (
    FAULT,
    HEALTHY,
    run_verdicts,
)

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_integers_that_collide_fail_where_they_are_used() -> None:
    fault = replace(FAULT, kind=faults.COLLISION, elements=3)
    assert run_verdicts(replace(HEALTHY, faults=(fault,)), "integer-cast") == [Verdict.FAIL]
    assert run_verdicts(replace(HEALTHY, faults=(replace(fault, reaches={}),)), "integer-cast") == [Verdict.WARN]
    assert run_verdicts(replace(HEALTHY, whole=2), "integer-cast") == [Verdict.PASS]
    assert run_verdicts(HEALTHY, "integer-cast") == [Verdict.SKIP]
