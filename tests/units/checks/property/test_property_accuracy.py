from __future__ import annotations

import pytest

from ampcheck.checks.property.property_accuracy import check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.property import ACCURACY, DECISION, RANGE, Problem
from checks.property.records import record

ASKED = {"asked": ("property-accuracy",)}


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (
            Problem(ACCURACY, low=1.5, exact=1.0, observed=0.5, limit=0.001),
            "is 1.5 and should be 1: a relative error of 0.5",
        ),
        (Problem(ACCURACY, detail="the sum", observed=0.5), "agree with float64; the sum has a relative error of 0.5"),
        (Problem(DECISION, detail="index 3", observed=0.5), "except for near ties; index 3 is another"),
    ],
    ids=["element", "op", "decision"],
)
def test_an_error_beyond_rounding_is_a_failure(problem: Problem, words: str) -> None:
    (finding,) = check(record(problem, **ASKED), Limits())
    assert finding.verdict is Verdict.FAIL
    assert words in finding.message
    assert finding.unit == "relative error"


def test_a_pass_gives_the_largest_error_of_its_limit() -> None:
    (finding,) = check(record(Problem(RANGE), ratio=0.25, **ASKED), Limits())
    assert (finding.verdict, finding.observed, finding.unit) == (Verdict.PASS, 0.25, "of the limit")
