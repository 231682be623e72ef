from __future__ import annotations

from ampcheck.checks.parity.kernel import CHECK, check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.parity import LEFT_OUT, PASSED, REFUSED, SAYS_NOTHING, KernelTrial, Tried


def finding(*tried: Tried) -> Finding:
    (found,) = check(KernelTrial("mm", "reference", tried), Limits())
    return found


def test_a_kernel_passes_with_the_worst_of_its_cases() -> None:
    found = finding(Tried("size 1", PASSED, error=0.5, limit=3.0), Tried("size 2", PASSED, error=2.0, limit=3.0))
    assert (found.check, found.verdict, found.seen) == (CHECK.slug, Verdict.PASS, 2)
    assert (found.observed, found.limit) == (2.0, 3.0)
    assert "on size 2" in found.message


def test_one_case_is_enough_to_refuse_it_and_the_furthest_is_named() -> None:
    wrong = Tried("size 33", REFUSED, "output", 20.0, 3.0, "output: rows are off")
    found = finding(Tried("size 32", PASSED), Tried("size 17", REFUSED, error=9.0, limit=3.0, reason="off"), wrong)
    assert (found.verdict, found.observed) == (Verdict.FAIL, 20.0)
    assert "on size 33: output: rows are off; refused on 2 of 3 cases" in found.message


def test_zeros_alone_certify_nothing() -> None:
    found = finding(Tried("zeros", SAYS_NOTHING, reason="all zero"), Tried("size 9", LEFT_OUT, reason="it raises"))
    assert found.verdict is Verdict.UNDECIDED
    assert "all zero; it raises" in found.message
