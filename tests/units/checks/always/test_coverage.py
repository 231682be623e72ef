"""The check coverage, on records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.checks.always.coverage import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Verdict
from ampcheck.records.property import NONFINITE, Peak, Problem
from ampcheck.telemetry.checks import check_telemetry
from checks.property.records import record
from checks.range.records import HEALTHY, LIMITS, run_verdicts, site, stats

PASS, FAIL, WARN, SKIP = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.SKIP


def test_a_run_without_an_op_in_the_format_is_not_a_pass() -> None:
    assert run_verdicts(replace(HEALTHY, low=0), "coverage") == [Verdict.WARN]
    assert run_verdicts(replace(HEALTHY, low=0, coverage=Coverage()), "coverage") == [Verdict.FAIL]


def test_a_pass_tells_what_was_not_looked_at() -> None:
    seen = stats(site(), every=10, calls=40, measured=4, unseen={"graphs to which no statistics could be added": 1})
    (finding,) = [one for one in check_telemetry(seen, LIMITS) if one.check == "coverage"]
    assert finding.verdict is PASS
    assert "no statistics could be added (1x)" in finding.message
    assert "(36x)" in finding.message


def test_nothing_measured_is_a_failure_that_names_what_was_not_seen() -> None:
    (finding,) = check_telemetry(stats(measured=0, unseen={"graphs that could not be compiled": 2}), LIMITS)

    assert (finding.check, finding.verdict) == ("coverage", FAIL)
    assert "graphs that could not be compiled (2x)" in finding.message


@pytest.mark.parametrize(("level", "told"), [("casts", True), ("all", False)])
def test_where_nothing_was_measured_a_wider_level_is_named_if_there_is_one(level: str, told: bool) -> None:
    (finding,) = check_telemetry(replace(stats(measured=0), level=level), LIMITS)

    assert finding.verdict is FAIL
    assert ("level='all'" in finding.hint) is told


def test_a_release_that_cannot_be_watched_is_a_skip_with_the_reason() -> None:
    (finding,) = check_telemetry(stats(measured=0, skipped="PyTorch 9.9 is new"), LIMITS)

    assert (finding.check, finding.verdict) == ("coverage", SKIP)
    assert "PyTorch 9.9 is new" in finding.message


def test_a_search_that_examined_nothing_fails_and_says_so_alone() -> None:
    (finding,) = check(record(elements=0, examples=3, outside=3, coverage=Coverage()), Limits())
    assert (finding.verdict, finding.observed) == (FAIL, 0)
    assert "of 3 examples none could be judged" in finding.message
    (lacking,) = check(record(elements=0, lacking="no kernel"), Limits())
    assert lacking.verdict is SKIP


def test_a_search_is_a_warning_where_nothing_computed_in_the_format_or_most_inputs_were_refused() -> None:
    assert [f.verdict for f in check(record(), Limits())] == [WARN]
    assert [f.verdict for f in check(record(peak=Peak(0.1, 1.0, format="float16")), Limits())] == [PASS]
    assert [f.verdict for f in check(record(Problem(NONFINITE), outside=150), Limits())] == [WARN]
