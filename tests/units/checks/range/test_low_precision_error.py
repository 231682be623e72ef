"""The check low-precision-error, on records."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict, Where
from ampcheck.numerics import check_numerics
from ampcheck.records.numerics import Raised
from checks.range.records import (
    HEALTHY,
)

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_a_run_that_raised_says_nothing_else() -> None:
    raised = replace(HEALTHY, raised=Raised(Where("forward", "layer"), "RuntimeError: planted"))
    findings = check_numerics(raised, Limits())
    assert [f.check for f in findings if f.verdict is Verdict.FAIL] == ["low-precision-error"]
    assert Verdict.PASS not in {f.verdict for f in findings}


def test_it_is_always_said_whether_it_ran_also_when_other_checks_were_asked_for() -> None:
    raised = replace(HEALTHY, raised=Raised(Where("forward"), "RuntimeError: planted"))
    assert "low-precision-error" in {f.check for f in check_numerics(raised, Limits(), ["overflow"])}


def test_a_machine_without_a_kernel_is_no_failure_of_the_model() -> None:
    missing = replace(HEALTHY, raised=Raised(Where("forward"), "no kernel", missing=True))
    assert Verdict.FAIL not in {f.verdict for f in check_numerics(missing, Limits())}
