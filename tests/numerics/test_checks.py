"""The checks are pure functions: from a record made by hand to its verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.catalog import REGISTRY
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Verdict, Where
from ampcheck.numerics import CHECKS, NumericsStats, check_numerics
from ampcheck.numerics.decisions import Flip
from ampcheck.numerics.facts import OpFacts
from ampcheck.numerics.stats import LOST, Raised, TensorError

OUTPUT = TensorError("output", "", "bfloat16", 0.001, 0.004, 0.0, 0)
GRADIENT = TensorError("gradient", "layer.weight", "float32", 0.001, 0.004, 0.001, 0)
HEALTHY = NumericsStats(
    "model",
    "bfloat16, eager",
    "bfloat16",
    "cpu",
    errors=(OUTPUT, GRADIENT),
    chain=4,
    low=10,
    coverage=Coverage({"ops": 20, "16-bit ops": 10}),
)
FACT = OpFacts(Where("forward", "layer", "aten::mm", "model.py", 3), "float16", numel=8)


def _verdicts(stats: NumericsStats, check: str) -> list[Verdict]:
    return [f.verdict for f in check_numerics(stats, Limits()) if f.check == check]


def test_every_check_has_a_page_and_passes_or_skips_a_healthy_run() -> None:
    assert set(CHECKS) <= set(REGISTRY)
    assert {f.verdict for f in check_numerics(HEALTHY, Limits())} <= {Verdict.PASS, Verdict.SKIP}


@given(sensitivity=st.floats(0, 10), more=st.floats(0, 10), chain=st.integers(1, 50), factor=st.floats(0.1, 10))
def test_the_limit_grows_with_what_explains_an_error(
    sensitivity: float, more: float, chain: int, factor: float
) -> None:
    stats = replace(HEALTHY, chain=chain)
    error = replace(OUTPUT, sensitivity=sensitivity)
    limit = stats.error_limit(error, factor)
    assert limit >= factor * stats.unit_roundoff
    assert stats.error_limit(replace(error, sensitivity=sensitivity + more), factor) >= limit
    assert replace(stats, chain=chain + 1).error_limit(error, factor) >= limit
    assert stats.error_limit(error, 2 * factor) >= limit


@pytest.mark.parametrize("sensitivity", [0.0, 1.0, float("inf")])
def test_an_output_of_which_nothing_is_left_fails_whatever_explains_it(sensitivity: float) -> None:
    lost = replace(OUTPUT, error=LOST + 0.1, sensitivity=sensitivity)
    assert _verdicts(replace(HEALTHY, errors=(lost,)), "precision-loss") == [Verdict.FAIL]


def test_an_error_below_the_rounding_of_the_whole_gradient_is_no_failure() -> None:
    far = replace(GRADIENT, error=0.9, share=1e-5)
    assert Verdict.FAIL not in _verdicts(replace(HEALTHY, errors=(OUTPUT, far)), "precision-loss")
    assert Verdict.FAIL in _verdicts(replace(HEALTHY, errors=(OUTPUT, replace(far, share=0.5))), "precision-loss")


def test_a_gradient_that_float32_does_not_know_is_not_compared() -> None:
    unknown = replace(GRADIENT, error=1e4, share=1.0, float32=1.0)
    assert Verdict.FAIL not in _verdicts(replace(HEALTHY, errors=(OUTPUT, unknown)), "precision-loss")


def test_nothing_compared_is_not_a_pass() -> None:
    empty = replace(OUTPUT, error=0.0, compared=0)
    assert _verdicts(replace(HEALTHY, errors=(empty,)), "precision-loss") == [Verdict.SKIP]


def test_an_infinite_output_fails_also_where_no_op_was_seen_to_make_it() -> None:
    infinite = replace(OUTPUT, nonfinite=3)
    assert _verdicts(replace(HEALTHY, errors=(infinite,)), "overflow") == [Verdict.FAIL]


def test_an_absorbed_overflow_warns_and_one_that_is_seen_fails() -> None:
    produced = replace(FACT, produced=2, limited=True)
    assert _verdicts(replace(HEALTHY, ops=(produced,)), "overflow") == [Verdict.WARN]
    seen = replace(HEALTHY, ops=(produced,), errors=(replace(OUTPUT, nonfinite=1),))
    assert _verdicts(seen, "overflow") == [Verdict.FAIL]
    own = replace(HEALTHY, ops=(produced,), reference_produced=frozenset([FACT.where]))
    assert _verdicts(own, "overflow") == [Verdict.PASS]


def test_flushing_passes_without_a_trace_warns_with_a_small_one_and_fails_where_the_whole_suffers() -> None:
    flushed = replace(FACT, nonzero=8, flushed=6, flushed_share=0.3)
    assert _verdicts(replace(HEALTHY, ops=(flushed,)), "flush") == [Verdict.PASS]
    traced = replace(HEALTHY, ops=(flushed,), errors=(OUTPUT, replace(GRADIENT, error=0.9, share=1e-6)))
    assert _verdicts(traced, "flush") == [Verdict.WARN]
    harmed = replace(HEALTHY, ops=(flushed,), errors=(replace(OUTPUT, error=0.9),))
    assert _verdicts(harmed, "flush") == [Verdict.FAIL]
    few = replace(flushed, flushed=1)
    assert _verdicts(replace(HEALTHY, ops=(few,)), "flush") == [Verdict.PASS]


def test_a_coarse_cpu_kernel_explains_no_more_than_its_sum_and_never_a_lost_gradient() -> None:
    kernel = OpFacts(Where("backward", "layer", "aten::native_layer_norm_backward"), "bfloat16", error=0.09, terms=4096)
    off = replace(GRADIENT, error=0.1, share=0.1)
    assert _verdicts(replace(HEALTHY, ops=(kernel,), errors=(OUTPUT, off)), "precision-loss") == [Verdict.WARN]
    wrong = replace(kernel, error=0.9, terms=100_000)
    lost = replace(off, error=0.9)
    assert _verdicts(replace(HEALTHY, ops=(wrong,), errors=(OUTPUT, lost)), "precision-loss") == [Verdict.FAIL]
    elsewhere = replace(HEALTHY, device="cuda", ops=(kernel,), errors=(OUTPUT, off))
    assert _verdicts(elsewhere, "precision-loss") == [Verdict.FAIL]


def test_a_model_that_does_not_repeat_in_float64_is_not_compared() -> None:
    off = replace(HEALTHY, errors=(replace(OUTPUT, error=0.5), GRADIENT))
    assert _verdicts(off, "precision-loss") == [Verdict.FAIL]
    assert _verdicts(replace(off, unrepeated=0.4), "precision-loss") == [Verdict.INCOMPLETE]
    assert _verdicts(replace(off, unrepeated=1e-15), "precision-loss") == [Verdict.FAIL]


def test_a_loss_that_is_infinite_in_low_precision_alone_overflows() -> None:
    assert Verdict.FAIL not in _verdicts(HEALTHY, "overflow")
    assert _verdicts(replace(HEALTHY, loss_nonfinite=True), "overflow") == [Verdict.FAIL]
    compiled = replace(HEALTHY, compiled=True, graphs=1, loss_nonfinite=True)
    assert Verdict.FAIL in _verdicts(compiled, "overflow")


def test_switches_that_a_model_leaves_changed_fail() -> None:
    assert _verdicts(HEALTHY, "autocast-state") == []
    assert _verdicts(replace(HEALTHY, left={"default dtype": ("float32", "float64")}), "autocast-state") == [
        Verdict.FAIL
    ]


def test_a_decision_is_honest_only_near_a_tie_of_rounded_data() -> None:
    near = Flip(Where(), changed=3, numel=100, index=0, error=0.004, sensitivity=0.004, ranks=True)
    assert HEALTHY.honest(near, 2.0)
    assert not HEALTHY.honest(replace(near, sensitivity=0.0), 2.0)
    assert not HEALTHY.honest(replace(near, error=0.5), 2.0)
    assert not HEALTHY.honest(replace(near, changed=90), 2.0)
    assert not HEALTHY.honest(replace(near, ranks=False, changed=30), 2.0)


def test_a_run_that_raised_says_nothing_else() -> None:
    raised = replace(HEALTHY, raised=Raised(Where("forward", "layer"), "RuntimeError: planted"))
    findings = check_numerics(raised, Limits())
    assert [f.check for f in findings if f.verdict is Verdict.FAIL] == ["low-precision-error"]
    assert Verdict.PASS not in {f.verdict for f in findings}


def test_it_is_always_said_whether_it_ran_also_when_other_checks_were_asked_for() -> None:
    raised = replace(HEALTHY, raised=Raised(Where("forward"), "RuntimeError: planted"))
    assert "low-precision-error" in {f.check for f in check_numerics(raised, Limits(), ["overflow"])}


def test_a_machine_without_a_compiler_is_no_failure_of_the_model() -> None:
    missing = replace(HEALTHY, compiled=True, raised=Raised(Where("compile"), "InvalidCxxCompiler", missing=True))
    assert Verdict.FAIL not in {f.verdict for f in check_numerics(missing, Limits())}


def test_a_run_without_an_op_in_the_format_is_not_a_pass() -> None:
    assert _verdicts(replace(HEALTHY, low=0), "coverage") == [Verdict.WARN]
    assert _verdicts(replace(HEALTHY, low=0, coverage=Coverage()), "coverage") == [Verdict.FAIL]


def test_a_declaration_of_one_16_bit_format_says_nothing_of_another() -> None:
    declared = replace(HEALTHY, module_dtypes={"head": ("bfloat16",)}, declared_dtypes={"head": "bfloat16"})
    assert _verdicts(declared, "dtype") == [Verdict.PASS]
    assert _verdicts(replace(declared, declared_dtypes={"head": "float16"}), "dtype") == [Verdict.SKIP]
    assert _verdicts(replace(declared, declared_dtypes={"tail": "bfloat16"}), "dtype") == [Verdict.FAIL]


def test_what_is_left_out_of_a_long_list_is_counted() -> None:
    places = tuple(replace(FACT, where=replace(FACT.where, line=n), produced=1, limited=True) for n in range(9))
    found = [f for f in check_numerics(replace(HEALTHY, ops=places), Limits()) if f.check == "overflow"]
    assert len(found) == 5
    assert "4 further places are left out" in found[-1].message


def test_an_error_that_float32_has_as_well_is_a_warning_of_its_own() -> None:
    lost = replace(OUTPUT, error=0.5, in_float32=0.4)
    assert _verdicts(replace(HEALTHY, errors=(lost,)), "precision-loss") == [Verdict.WARN]
    mine = replace(OUTPUT, name="other", error=0.5, in_float32=0.01)
    assert _verdicts(replace(HEALTHY, errors=(lost, mine)), "precision-loss") == [Verdict.FAIL]
    nothing = replace(
        OUTPUT, kind="module", name="mean", error=2.5e9, in_float32=1.2e9
    )  # a mean that is zero by design
    assert _verdicts(replace(HEALTHY, errors=(OUTPUT, nothing)), "precision-loss") == [Verdict.PASS]


def test_a_mask_inside_a_derivative_that_is_absorbed_is_no_finding_and_one_that_reaches_a_gradient_is() -> None:
    place = Where("backward", "layer", "aten::sub.Tensor", "model.py", 3)
    masked = replace(FACT, where=place, produced=2, limited=True, amax_in=65504.0, calls=1)
    assert _verdicts(replace(HEALTHY, ops=(masked,)), "overflow") == [Verdict.PASS]
    harmed = replace(HEALTHY, ops=(masked,), errors=(OUTPUT, replace(GRADIENT, nonfinite=3)))
    assert _verdicts(harmed, "overflow") == [Verdict.FAIL]
    for amax in (9e3, 1e6):  # a value, and not the lowest number of the format
        assert _verdicts(replace(HEALTHY, ops=(replace(masked, amax_in=amax),)), "overflow") == [Verdict.WARN]
