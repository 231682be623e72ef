from __future__ import annotations

from ampcheck.checks.parity.parity import CHECK, check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.records.parity import AGREE, ANOTHER, UNDECIDED, WRONG, KernelResult, Parity


def finding(parity: Parity) -> Finding:
    (found,) = check(parity, Limits())
    return found


def test_two_that_agree_pass_with_the_number_of_results_and_their_distance() -> None:
    found = finding(Parity(AGREE, "the same function", roundings=1.5, compared=3, notes=("no gradients",)))
    assert (found.check, found.verdict, found.seen, found.observed) == (CHECK.slug, Verdict.PASS, 3, 1.5)
    assert found.message.endswith("; no gradients")


def test_another_function_fails_at_the_op_of_the_second() -> None:
    at = Where(op="aten::add", file="a.py", line=3), Where(op="aten::sqrt", file="b.py", line=7)
    found = finding(Parity(ANOTHER, "exact values differ", at=at))
    assert (found.verdict, found.where) == (Verdict.FAIL, at[1])
    assert found.message.startswith("two executions must compute one function; exact values differ")


def test_a_side_beyond_its_bound_has_the_hint_of_its_own_finding() -> None:
    inner = Finding("overflow", Verdict.FAIL, "b", "inf", hint="scale before squaring")
    found = finding(Parity(WRONG, "b: inf", wrong=("b",), failures=(inner,)))
    assert (found.verdict, found.hint) == (Verdict.FAIL, inner.hint)


def test_a_kernel_beyond_its_bound_shows_its_error_in_roundings() -> None:
    kernel = KernelResult(Where(op="my::mm"), "my::mm", "rows are off", 12.0, 3.5)
    found = finding(Parity(WRONG, "b: my::mm", wrong=("b",), kernels=(kernel,)))
    assert (found.observed, found.limit, found.unit) == (12.0, 3.5, "roundings")


def test_what_the_data_do_not_determine_is_open() -> None:
    found = finding(Parity(UNDECIDED, "output: zero", compared=1))
    assert found.verdict is Verdict.UNDECIDED
    assert "give inputs that determine" in found.hint
