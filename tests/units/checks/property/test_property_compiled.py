from __future__ import annotations

from ampcheck.checks.property.property_compiled import CHECK, check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.property import COMPILED, Problem
from checks.property.records import record

ASKED = {"asked": ("property-compiled",)}


def test_compiled_code_beyond_its_bounds_is_a_failure() -> None:
    (finding,) = check(record(Problem(COMPILED, low=2.0, exact=1.0), **ASKED), Limits())
    assert finding.verdict is Verdict.FAIL
    assert "element 0 of the output is 2, and 1 in float64" in finding.message


def test_compiled_code_that_raises_is_one_too() -> None:
    (finding,) = check(record(Problem(COMPILED, detail="it raises RuntimeError"), **ASKED), Limits())
    assert "keeps; it raises RuntimeError" in finding.message


def test_a_machine_without_a_compiler_is_a_skip_with_its_reason() -> None:
    (finding,) = check(record(skipped={CHECK.slug: "no compiler"}, **ASKED), Limits())
    assert (finding.verdict, finding.message) == (Verdict.SKIP, "no compiler")


def test_a_pass_counts_the_examples_that_ran_compiled() -> None:
    (finding,) = check(record(compiled_examples=7, **ASKED), Limits())
    assert (finding.verdict, finding.seen) == (Verdict.PASS, 7)
