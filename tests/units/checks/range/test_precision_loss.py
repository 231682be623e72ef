"""The check precision-loss, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.results import Examination
from checks.range.records import (
    FAULT,
    GRADIENT,
    HEALTHY,
    OUTPUT,
    PLACE,
    far,
    run_findings,
    run_verdicts,
)

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_lost_digits_that_reach_an_output_fail_and_name_their_place() -> None:
    stats = replace(HEALTHY, faults=(FAULT,), sources={("model.py", 3): "y = a - b"}, errors=(far(OUTPUT), GRADIENT))
    (finding,) = run_findings(stats, "precision-loss")
    assert finding.verdict is Verdict.FAIL
    assert finding.where == PLACE
    assert "mm in `y = a - b`" in finding.message
    assert "it reaches output" in finding.message
    assert (finding.observed, finding.limit) == (0.9, 0.1)


def test_lost_digits_that_reach_nothing_are_no_finding() -> None:
    stats = replace(HEALTHY, faults=(replace(FAULT, reaches={}),))
    assert run_verdicts(stats, "precision-loss") == [Verdict.PASS]


def test_an_error_below_the_rounding_of_the_whole_gradient_is_no_failure() -> None:
    small = replace(far(GRADIENT), norm=1e-5)
    assert Verdict.FAIL not in run_verdicts(replace(HEALTHY, errors=(OUTPUT, small)), "precision-loss")
    assert Verdict.FAIL in run_verdicts(replace(HEALTHY, errors=(OUTPUT, far(GRADIENT))), "precision-loss")


def test_a_gradient_that_the_data_do_not_determine_is_not_compared() -> None:
    unknown = replace(GRADIENT, seen=Examination(64, error=1e4, spread=1.0), norm=1.0)
    assert Verdict.FAIL not in run_verdicts(replace(HEALTHY, errors=(OUTPUT, unknown)), "precision-loss")


@pytest.mark.parametrize(("precision", "verdict"), [(2.0, Verdict.FAIL), (100.0, Verdict.PASS)])
def test_the_limit_of_a_repository_scales_the_bounds(precision: float, verdict: Verdict) -> None:
    stats = replace(HEALTHY, faults=(FAULT,))
    assert run_verdicts(stats, "precision-loss", Limits(precision=precision)) == [verdict]


def test_what_is_left_out_of_a_long_list_is_counted() -> None:
    places = tuple(replace(FAULT, where=replace(PLACE, line=n)) for n in range(9))
    findings = run_findings(replace(HEALTHY, faults=places), "precision-loss")
    assert len(findings) == 5
    assert "4 further places are left out" in findings[-1].message
