from __future__ import annotations

from ampcheck.checks.parity.golden import CHECK, check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.records.parity import GoldenComparison


def finding(**fields: object) -> Finding:
    values = {"name": "logits", "file": "goldens/test_model.json", "made_in": "torch 2.12", "results": 2, "digits": 2.4}
    (found,) = check(GoldenComparison(**{**values, **fields}), Limits())  # type: ignore[arg-type]
    return found


def test_equal_exact_values_pass() -> None:
    found = finding()
    assert (found.check, found.verdict, found.seen) == (CHECK.slug, Verdict.PASS, 2)


def test_a_change_of_exact_values_fails_and_names_the_result() -> None:
    found = finding(differing={"output": "3 of 8 elements differ in float64, by up to 0.01 of their size"})
    assert found.verdict is Verdict.FAIL
    assert "torch 2.12); output: 3 of 8 elements" in found.message


def test_a_result_that_the_data_do_not_determine_is_open() -> None:
    found = finding(differing={"gradient": "differs"}, undetermined=("gradient",))
    assert found.verdict is Verdict.UNDECIDED


def test_a_run_that_is_beyond_its_own_bound_fails_whatever_was_recorded() -> None:
    inner = Finding("precision-loss", Verdict.FAIL, "logits", "error 0.3", hint="sum in float32")
    found = finding(failures=(inner,))
    assert (found.verdict, found.hint) == (Verdict.FAIL, "sum in float32")


def test_a_golden_that_is_not_there_fails_with_the_command_that_writes_it() -> None:
    found = finding(made_in=None)
    assert found.verdict is Verdict.FAIL
    assert "pytest --ampcheck-update" in found.hint


def test_other_results_than_were_recorded_fail() -> None:
    found = finding(gone=("output mask",), new=("output logits",))
    assert found.message.endswith("gone: output mask; new: output logits")


def test_a_kernel_that_cannot_be_followed_leaves_it_open() -> None:
    behind = {"opaque": ("my::op",), "behind_opaque": ("output 0",)}
    assert finding(**behind, differing={"output 0": "by much"}).verdict is Verdict.UNDECIDED
    assert finding(**behind).verdict is Verdict.UNDECIDED
    assert finding(**behind, differing={"output 1": "by much"}).verdict is Verdict.FAIL


def test_a_golden_that_was_written_passes() -> None:
    assert finding(written=True).verdict is Verdict.PASS


def test_other_arguments_fail_and_other_last_digits_leave_a_change_open() -> None:
    found = finding(differing={"output": "differs"}, changed={"argument 0": "1 of 8 elements differ"})
    assert found.verdict is Verdict.FAIL
    assert "argument 0: 1 of 8 elements differ" in found.message
    assert finding(differing={"output": "differs"}, shaken={"argument 0": "differs"}).verdict is Verdict.UNDECIDED
    assert finding(shaken={"argument 0": "differs"}).verdict is Verdict.PASS
