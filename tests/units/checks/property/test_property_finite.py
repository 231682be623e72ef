from __future__ import annotations

from ampcheck.checks.property.property_finite import CHECK, check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict, Where
from ampcheck.records.property import ACCURACY, NONFINITE, RANGE, Problem
from checks.property.records import record

ASKED = {"asked": ("property-finite",)}


def test_an_infinite_output_is_a_failure_with_its_input_and_a_remedy() -> None:
    problem = Problem(NONFINITE, index=2, low=float("inf"), exact=1.0, where=Where(op="aten::exp"))
    (finding,) = check(record(problem, **ASKED), Limits())
    assert (finding.check, finding.verdict) == (CHECK.slug, Verdict.FAIL)
    assert "element 2 of the output is inf, and 1 in float64" in finding.message
    assert "torch.tensor([12.0]), after 3 of 200 examples" in finding.message
    assert finding.hint.startswith("subtract the largest before exp")


def test_a_value_beyond_the_format_is_one_too() -> None:
    (finding,) = check(record(Problem(RANGE, low=float("inf"), exact=1e6), **ASKED), Limits())
    assert "no code mends that" in finding.message


def test_a_search_that_finds_none_counts_what_it_judged() -> None:
    (finding,) = check(record(Problem(ACCURACY), outside=50, **ASKED), Limits())
    assert (finding.verdict, finding.seen) == (Verdict.PASS, 400)
    assert "150 examples" in finding.message
    assert list(check(record(), Limits())) == [], "nobody looked for it"
