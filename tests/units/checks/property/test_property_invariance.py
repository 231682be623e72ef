from __future__ import annotations

from ampcheck.checks.property.property_invariance import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.property import INVARIANCE, NONFINITE, Problem
from checks.property.records import record


def test_a_broken_invariance_is_a_failure() -> None:
    problem = Problem(INVARIANCE, detail="rows in another order", low=2.0, exact=1.0)
    (finding,) = check(record(problem, invariances={"batch order": 9}), Limits())
    assert finding.verdict is Verdict.FAIL
    assert "rows in another order: element 0 of the output is 2, not 1" in finding.message


def test_each_invariance_that_held_is_a_pass_and_one_that_changed_nothing_a_failure() -> None:
    held, idle = check(record(invariances={"scale": 9, "padding": 0}), Limits())
    assert (held.verdict, held.seen) == (Verdict.PASS, 9)
    assert (idle.verdict, idle.observed) == (Verdict.FAIL, 0)


def test_what_another_property_breaks_first_is_not_judged() -> None:
    (finding,) = check(record(Problem(NONFINITE), invariances={"padding": 0}), Limits())
    assert finding.verdict is Verdict.SKIP
