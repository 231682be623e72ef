"""Where the line lies between compiled code that differs and compiled code that is worse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.compiled.accuracy.checks import CHECKS, check_accuracy
from ampcheck.compiled.accuracy.judge import check_compiled_against_eager
from ampcheck.compiled.accuracy.stats import (
    AOT_EAGER,
    BACKWARD_AUTOCAST,
    EMULATED,
    AccuracyStats,
    Deviation,
    Exceptions,
    Trial,
)
from ampcheck.core.formats import FORMATS
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Verdict
from ampcheck.numerics.stats import NumericsStats, TensorError

U16 = FORMATS["bfloat16"].unit_roundoff
U32 = FORMATS["float32"].unit_roundoff
FACTOR = Limits().precision


def deviation(kind: str = "output", **facts: Any) -> Deviation:
    given = {"name": "", "step": 0, "dtype": "float32", "eager": (U32,) * 3, "compiled": (U32,) * 3, "grain": U32}
    return Deviation(kind, **{**given, "share": 1.0, "eager_share": U32, "numel": 100, **facts})


def stats(*deviations: Deviation, **facts: Any) -> AccuracyStats:
    whole = AccuracyStats("model", "bfloat16", "bfloat16", "cpu", reference="float64", autocast=True, graphs=1)
    return replace(whole, deviations=deviations, coverage=Coverage({"outputs": len(deviations)}), **facts)


def verdicts(given: AccuracyStats, check: str) -> list[Verdict]:
    return [f.verdict for f in check_accuracy(given, Limits()) if f.check == check]


def only(given: AccuracyStats, check: str, verdict: Verdict) -> Finding:
    (found,) = [f for f in check_accuracy(given, Limits()) if f.check == check and f.verdict is verdict]
    return found


def test_compiled_code_that_differs_from_eager_mode_and_is_nearer_to_float64_passes() -> None:
    nearer = deviation(eager=(U16,) * 3, compiled=(U16 / 100,) * 3, between=U16)
    assert verdicts(stats(nearer), "compiled-error") == [Verdict.PASS]


def test_compiled_code_that_is_as_far_off_as_eager_mode_passes() -> None:
    assert verdicts(stats(deviation(eager=(U16,) * 3, compiled=(2 * U16,) * 3)), "compiled-error") == [Verdict.PASS]


def test_compiled_code_with_sixteen_bits_where_eager_mode_has_float32_fails() -> None:
    for kind, check in (("output", "compiled-error"), ("loss", "compiled-error"), ("gradient", "compiled-gradient")):
        assert verdicts(stats(deviation(kind, compiled=(U16,) * 3)), check) == [Verdict.FAIL], kind


def test_a_lucky_eager_zero_is_no_measure() -> None:
    exact = deviation(eager=(0.0,) * 3, compiled=(2 * U32,) * 3)
    assert verdicts(stats(exact), "compiled-error") == [Verdict.PASS]
    rounded = deviation(eager=(0.0,) * 3, compiled=(U16,) * 3, grain=U16, dtype="bfloat16")
    assert verdicts(stats(rounded), "compiled-error") == [Verdict.PASS]


def test_what_is_worse_on_some_of_the_data_only_is_luck() -> None:
    assert verdicts(stats(deviation(compiled=(U16, U32, U16))), "compiled-error") == [Verdict.PASS]


def test_a_long_sum_may_be_made_in_another_order() -> None:
    reordered = deviation(eager=(U32,) * 3, compiled=(40 * U32,) * 3)
    assert verdicts(stats(reordered), "compiled-error") == [Verdict.FAIL]
    assert verdicts(stats(reordered, reduction=4096), "compiled-error") == [Verdict.PASS]


def test_a_gradient_that_is_zero_but_for_rounding_is_not_compared_digit_by_digit() -> None:
    noise = deviation("gradient", eager=(3.0,) * 3, compiled=(40.0,) * 3, share=1e-9, eager_share=1e-10)
    assert verdicts(stats(noise), "compiled-gradient") == [Verdict.PASS]
    as_eager = replace(noise, share=0.1, eager_share=0.05)
    assert verdicts(stats(as_eager), "compiled-gradient") == [Verdict.PASS]
    harm = replace(noise, share=0.1)
    assert verdicts(stats(harm), "compiled-gradient") == [Verdict.FAIL]


def test_a_pass_names_the_largest_error_of_what_eager_mode_knows() -> None:
    noise = deviation("gradient", name="noise", eager=(3.0,) * 3, compiled=(40.0,) * 3, share=1e-9, eager_share=1e-10)
    known = deviation("gradient", name="known", eager=(U16,) * 3, compiled=(U16,) * 3)
    assert "known" in only(stats(noise, known), "compiled-gradient", Verdict.PASS).message


def test_a_gradient_of_rounding_alone_may_move_the_whole_by_a_rounding_of_the_format_and_no_more() -> None:
    lost = deviation("gradient", eager=(1.0,) * 3, compiled=(1e11,) * 3, share=U16, eager_share=1e-17, float32=2.0)
    assert verdicts(stats(lost), "compiled-gradient") == [Verdict.PASS]
    assert verdicts(stats(replace(lost, share=10 * U16)), "compiled-gradient") == [Verdict.FAIL]
    real = replace(lost, float32=U32)
    assert verdicts(stats(real), "compiled-gradient") == [Verdict.FAIL], "float64 knows it, whatever eager mode does"
    known = replace(lost, eager=(1e-3,) * 3)
    assert verdicts(stats(known), "compiled-gradient") == [Verdict.FAIL]


def test_inf_or_nan_in_compiled_code_alone_fails() -> None:
    lost = deviation("gradient", compiled=(math.inf, U32, U32), nonfinite=4, lost=4, share=0.0)
    found = only(stats(lost), "compiled-gradient", Verdict.FAIL)
    assert "4 elements of gradient are inf or NaN" in found.message


def test_an_overflow_that_compilation_hides_is_told_and_is_no_failure() -> None:
    hidden = deviation(eager=(math.inf,) * 3, eager_nonfinite=7)
    assert "eager mode overflows" in only(stats(hidden), "compiled-error", Verdict.WARN).message
    assert Verdict.FAIL not in verdicts(stats(hidden), "compiled-error")


def test_many_more_infinities_than_in_eager_mode_fail() -> None:
    same = deviation("gradient", eager_nonfinite=2, nonfinite=2)
    assert verdicts(stats(same), "compiled-gradient") == [Verdict.PASS]
    edge = replace(same, nonfinite=3, lost=1)
    assert "edge of overflow" in only(stats(edge), "compiled-gradient", Verdict.WARN).hint
    assert verdicts(stats(replace(same, nonfinite=50, lost=48)), "compiled-gradient") == [Verdict.FAIL]


def test_beside_an_infinity_the_finite_rest_is_compared_all_the_same() -> None:
    rest = deviation(compiled=(U16,) * 3, nonfinite=1, eager_nonfinite=1)
    assert verdicts(stats(rest), "compiled-error") == [Verdict.FAIL]
    edge = replace(rest, lost=1)
    assert verdicts(stats(edge), "compiled-error") == [Verdict.FAIL], "the edge of overflow does not excuse the rest"


def test_what_no_limit_can_judge_is_a_skip_with_the_reason_and_never_a_pass() -> None:
    overflown = deviation(eager=(math.inf,) * 3, compiled=(0.3,) * 3)
    assert "nothing of it is finite" in only(stats(overflown), "compiled-error", Verdict.SKIP).message
    assert verdicts(stats(overflown), "compiled-error") == [Verdict.SKIP]
    assert verdicts(stats(overflown), "coverage") == [Verdict.SKIP]
    beside = stats(overflown, deviation(name="other"))
    assert verdicts(beside, "compiled-error") == [Verdict.PASS, Verdict.SKIP]
    unbounded = deviation(float32=math.inf, eager=(U32,), compiled=(0.3,))
    assert verdicts(stats(unbounded), "compiled-error") == [Verdict.SKIP]


def test_where_float32_says_nothing_eager_mode_on_other_data_gives_the_limit() -> None:
    assert verdicts(stats(deviation(float32=math.inf)), "compiled-error") == [Verdict.PASS]
    assert verdicts(stats(deviation(float32=math.inf, compiled=(0.3,) * 3)), "compiled-error") == [Verdict.FAIL]


def test_what_a_decision_near_a_tie_moves_is_a_warning_at_most() -> None:
    flipped = deviation(eager=(U16,) * 3, compiled=(0.3,) * 3, turned=0.4)
    assert verdicts(stats(flipped), "compiled-error") == [Verdict.FAIL]
    assert verdicts(stats(flipped, near_ties=3), "compiled-error") == [Verdict.WARN]
    unmoved = replace(flipped, turned=0.0)
    assert verdicts(stats(unmoved, near_ties=3), "compiled-error") == [Verdict.FAIL]
    wild = replace(flipped, compiled=(30.0,) * 3)
    assert verdicts(stats(wild, near_ties=3), "compiled-error") == [Verdict.FAIL]


def test_an_index_may_turn_at_a_near_tie_and_nowhere_else() -> None:
    one = deviation(dtype="int64", eager=(0.0,) * 3, compiled=(0.01,) * 3, grain=0.0)
    assert verdicts(stats(one), "compiled-error") == [Verdict.FAIL]
    assert verdicts(stats(one, near_ties=1), "compiled-error") == [Verdict.PASS]


def test_a_float32_output_with_sixteen_bits_of_digits_in_eager_mode_alone_is_a_warning() -> None:
    finer = deviation(eager=(U16,) * 3, compiled=(0.0,) * 3, between=U16)
    assert verdicts(stats(finer, autocast=False), "compiled-error") == [Verdict.PASS, Verdict.WARN]
    assert verdicts(stats(finer), "compiled-error") == [Verdict.PASS]
    as_coarse = replace(finer, compiled=(U16 / 2,) * 3)
    assert verdicts(stats(as_coarse, autocast=False), "compiled-error") == [Verdict.PASS]


def test_the_setting_that_was_tried_and_mends_it_is_named_and_no_other() -> None:
    bad = deviation("gradient", compiled=(U16,) * 3)
    mended = stats(bad, trials=(Trial(BACKWARD_AUTOCAST, True),))
    assert f'{BACKWARD_AUTOCAST} = "off"' in only(mended, "compiled-gradient", Verdict.FAIL).hint
    not_mended = stats(bad, trials=(Trial(BACKWARD_AUTOCAST, False), Trial(EMULATED, True), Trial(AOT_EAGER, True)))
    found = only(not_mended, "compiled-gradient", Verdict.FAIL)
    assert BACKWARD_AUTOCAST not in found.hint
    assert "emulate_precision_casts = True" in found.hint
    traced = stats(bad, trials=(Trial(EMULATED, False), Trial(AOT_EAGER, False)))
    assert "before Inductor" in only(traced, "compiled-gradient", Verdict.FAIL).message
    kernels = stats(bad, trials=(Trial(EMULATED, False), Trial(AOT_EAGER, True)))
    assert "Inductor's kernels err" in only(kernels, "compiled-gradient", Verdict.FAIL).message


def test_what_only_one_side_raises_is_told_in_either_direction() -> None:
    def raised(**facts: str) -> Verdict:
        (verdict,) = verdicts(stats(exceptions=Exceptions(**facts)), "compiled-exception")
        return verdict

    assert raised(compiled="ValueError: no") is Verdict.FAIL
    assert raised(eager="ValueError: no", float32="ValueError: no") is Verdict.FAIL
    assert raised(eager="ValueError: no") is Verdict.WARN
    assert raised(eager="ValueError: no", compiled="ValueError: no") is Verdict.SKIP
    assert raised(compiled="no compiler", missing="no compiler") is Verdict.SKIP


def test_other_dtypes_shapes_or_containers_fail() -> None:
    eager = {"step 0": "tuple", "step 0, 0": "float32 [2]"}
    same = stats(deviation(), eager_shapes=eager, compiled_shapes=dict(eager))
    assert verdicts(same, "compiled-dtype") == [Verdict.PASS]
    for other in ({"step 0, 0": "bfloat16 [2]"}, {"step 0": "list"}, {"step 0, 1": "float32 [2]"}):
        differs = replace(same, compiled_shapes={**eager, **other})
        assert verdicts(differs, "compiled-dtype") == [Verdict.FAIL], other


def test_nothing_compiled_and_nothing_compared_are_no_pass() -> None:
    for empty in (stats(deviation(), graphs=0), stats(), stats(exceptions=Exceptions(eager="no", compiled="no"))):
        assert Verdict.PASS not in verdicts(empty, "compiled-error")
        assert verdicts(empty, "coverage") == [Verdict.FAIL]
    random = stats(incomparable="other random numbers")
    assert {f.verdict for f in check_accuracy(random, Limits()) if f.check in ("compiled-error", "coverage")} == {
        Verdict.SKIP
    }


def test_every_check_says_something_of_every_run() -> None:
    for one in (stats(deviation(), deviation("gradient")), stats(), stats(exceptions=Exceptions(eager="no"))):
        assert {f.check for f in check_accuracy(one, Limits())} == set(CHECKS)


@given(
    st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(1e-9, 1e-2), st.integers(1, 10**6), st.integers(1, 99)
)
def test_compiled_code_no_further_off_than_eager_mode_never_fails(
    one: float, two: float, three: float, float32: float, reduction: int, chain: int
) -> None:
    worst = max(one, two, three)
    for kind in ("output", "loss", "gradient", "update", "buffer"):
        given = stats(
            deviation(kind, eager=(one, two, three), compiled=(worst,) * 3, float32=float32),
            reduction=reduction,
            chain=chain,
        )
        assert not given.excess(FACTOR)


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["output", "loss", "buffer"]))
def test_a_larger_error_is_never_judged_better(less: float, more: float, kind: str) -> None:
    less, more = sorted((less, more))
    one = stats(deviation(kind, compiled=(less,) * 3))
    other = stats(deviation(kind, compiled=(more,) * 3))
    assert len(one.excess(FACTOR)) <= len(other.excess(FACTOR))


@pytest.mark.slow
def test_compiled_code_of_eager_modes_own_quality_fails_less_than_twice_in_a_thousand() -> None:
    # The independent oracle is a simulation: both arms draw the errors of n elements from one normal distribution. A
    # single number, the worst case, is the norm of one element; the floors are left out.
    draws = numpy.random.default_rng(0)
    for size in (1, 2, 8, 64):
        eager = numpy.linalg.norm(draws.normal(size=(100_000, 3, size)), axis=2)
        compiled = numpy.linalg.norm(draws.normal(size=(100_000, 3, size)), axis=2)
        failed = compiled.min(axis=1) > FACTOR**2 * eager.max(axis=1)
        assert failed.mean() < 2e-3, size


def test_where_eager_mode_is_right_by_luck_its_usual_error_is_the_measure() -> None:
    lucky = deviation(eager=(0.0,) * 3, compiled=(20 * U32,) * 3)
    assert verdicts(stats(lucky), "compiled-error") == [Verdict.FAIL]
    assert verdicts(stats(replace(lucky, rounded=6 * U32)), "compiled-error") == [Verdict.PASS]
    found = only(stats(replace(lucky, rounded=3 * U32)), "compiled-error", Verdict.FAIL)
    assert "or its usual error of 1.8e-07" in found.message


def test_an_audit_asks_for_the_usual_error_only_where_one_run_does_not_explain_it() -> None:
    def arm(error: float, compiled: bool) -> NumericsStats:
        output = TensorError("output", "", "float32", error, 0.01, 0.0, 0, compared=1, float32=U32)
        name = "bfloat16, compiled" if compiled else "bfloat16, eager"
        whole = NumericsStats("model", name, "bfloat16", "cpu", compiled=compiled, reference="float64", graphs=1)
        return replace(whole, errors=(output,), coverage=Coverage({"outputs": 1}))

    def judged(error: float, known: float) -> tuple[Verdict, list[int]]:
        asked: list[int] = []

        def usual(times: int) -> dict[tuple[str, str], float]:
            asked.append(times)
            return {("output", ""): known}

        found = check_compiled_against_eager(arm(0.0, False), arm(error, True), Limits(), usual)
        return found[0].verdict, asked

    assert judged(U32, U16) == (Verdict.PASS, [])
    assert judged(U16, U16) == (Verdict.PASS, [3])
    assert judged(U16, U32) == (Verdict.FAIL, [3, 12])


def test_nan_on_all_sides_is_no_agreement() -> None:
    spoiled = deviation(eager=(0.0,) * 3, compiled=(0.0,) * 3, judged=0, nan=100)
    assert verdicts(stats(spoiled), "compiled-error") == [Verdict.INCOMPLETE]
    assert verdicts(stats(spoiled), "coverage") == [Verdict.INCOMPLETE]
    partly = deviation(judged=99, nan=1)
    assert verdicts(stats(partly), "compiled-error") == [Verdict.PASS, Verdict.INCOMPLETE]


def test_a_comparison_of_no_element_is_no_pass() -> None:
    empty = deviation(eager=(0.0,) * 3, compiled=(0.0,) * 3, judged=0)
    assert verdicts(stats(empty), "compiled-error") == [Verdict.SKIP]
    assert verdicts(stats(empty), "coverage") == [Verdict.SKIP]


def test_an_audits_two_arms_are_judged_without_running_again() -> None:
    def arm(error: float, compiled: bool) -> NumericsStats:
        gradient = TensorError("gradient", "head.weight", "float32", error, 0.01, 1.0, 0, compared=64, float32=U32)
        output = TensorError("output", "", "float32", U16, 0.01, 0.0, 0, compared=64, float32=U32)
        name = "bfloat16, compiled" if compiled else "bfloat16, eager"
        whole = NumericsStats("model", name, "bfloat16", "cpu", compiled=compiled, reference="float64", graphs=1)
        return replace(whole, errors=(output, gradient), coverage=Coverage({"outputs": 1}))

    eager = arm(U32, False)
    good = check_compiled_against_eager(eager, arm(U32, True), Limits())
    assert [(f.check, f.verdict) for f in good] == [
        ("compiled-error", Verdict.PASS),
        ("compiled-gradient", Verdict.PASS),
    ]
    bad = check_compiled_against_eager(eager, arm(U16, True), Limits())
    assert [f.verdict for f in bad] == [Verdict.PASS, Verdict.FAIL]
