"""The checks are pure functions: from a record made by hand to its verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampcheck.checks import REGISTRY
from ampcheck.core.arm import Arm
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Verdict, Where
from ampcheck.numerics import CHECKS, NumericsStats, check_numerics, check_reference
from ampcheck.numerics.stats import Raised, Values
from ampcheck.records import faults
from ampcheck.records.results import ResultError
from ampcheck.shadow import Examination, Fault

U = 2.0**-8
SEEN = Examination(64, error=0.002, spread=0.004)
OUTPUT = ResultError(("output", "", 0), "bfloat16", SEEN, U, judged=64)
GRADIENT = ResultError(("gradient", "layer.weight", 0), "float32", SEEN, U, norm=0.001, judged=64)
HEALTHY = NumericsStats(
    "model",
    Arm("bfloat16", "eager"),
    "bfloat16",
    "cpu",
    errors=(OUTPUT, GRADIENT),
    ops=20,
    low=10,
    coverage=Coverage({"ops": 20, "16-bit ops": 10}),
)
PLACE = Where("forward", "layer", "aten::mm", "model.py", 3)
LOSSY = Examination(64, flagged=2, groups=4, error=0.9, spread=0.01, limit=0.1, impact=0.9)
FAULT = Fault(faults.CANCELLATION, PLACE, "float16", LOSSY, (4, 16), 10.0, 5.0, 6.0, reaches={"output": 1.0})


def _findings(stats: NumericsStats, check: str, limits: Limits | None = None) -> list[Finding]:
    return [f for f in check_numerics(stats, limits or Limits()) if f.check == check]


def _verdicts(stats: NumericsStats, check: str, limits: Limits | None = None) -> list[Verdict]:
    return [f.verdict for f in _findings(stats, check, limits)]


def _far(error: ResultError, far: float = 0.9, limit: float = 0.1) -> ResultError:
    seen = replace(error.seen, error=far, limit=limit, flagged=1, impact=far)
    return replace(error, seen=seen, norm=0.5 if error.kind == "gradient" else 1.0)


def test_every_check_has_a_page_and_passes_or_skips_a_healthy_run() -> None:
    assert set(CHECKS) <= set(REGISTRY)
    assert {f.verdict for f in check_numerics(HEALTHY, Limits())} <= {Verdict.PASS, Verdict.SKIP}


def test_lost_digits_that_reach_an_output_fail_and_name_their_place() -> None:
    stats = replace(HEALTHY, faults=(FAULT,), sources={("model.py", 3): "y = a - b"}, errors=(_far(OUTPUT), GRADIENT))
    (finding,) = _findings(stats, "precision-loss")
    assert finding.verdict is Verdict.FAIL
    assert finding.where == PLACE
    assert "mm in `y = a - b`" in finding.message
    assert "it reaches output" in finding.message
    assert (finding.observed, finding.limit) == (0.9, 0.1)


def test_lost_digits_that_reach_nothing_are_no_finding() -> None:
    stats = replace(HEALTHY, faults=(replace(FAULT, reaches={}),))
    assert _verdicts(stats, "precision-loss") == [Verdict.PASS]


def test_an_error_below_the_rounding_of_the_whole_gradient_is_no_failure() -> None:
    small = replace(_far(GRADIENT), norm=1e-5)
    assert Verdict.FAIL not in _verdicts(replace(HEALTHY, errors=(OUTPUT, small)), "precision-loss")
    assert Verdict.FAIL in _verdicts(replace(HEALTHY, errors=(OUTPUT, _far(GRADIENT))), "precision-loss")


def test_a_gradient_that_the_data_do_not_determine_is_not_compared() -> None:
    unknown = replace(GRADIENT, seen=Examination(64, error=1e4, spread=1.0), norm=1.0)
    assert Verdict.FAIL not in _verdicts(replace(HEALTHY, errors=(OUTPUT, unknown)), "precision-loss")


@pytest.mark.parametrize(("precision", "verdict"), [(2.0, Verdict.FAIL), (100.0, Verdict.PASS)])
def test_the_limit_of_a_repository_scales_the_bounds(precision: float, verdict: Verdict) -> None:
    stats = replace(HEALTHY, faults=(FAULT,))
    assert _verdicts(stats, "precision-loss", Limits(precision=precision)) == [verdict]


def test_nothing_compared_is_not_a_pass() -> None:
    nothing = replace(OUTPUT, seen=Examination(64, exact_nan=64))
    assert _verdicts(replace(HEALTHY, errors=(nothing,)), "precision-loss") == [Verdict.INCOMPLETE]
    assert _verdicts(replace(HEALTHY, errors=(nothing,)), "overflow") == [Verdict.INCOMPLETE]


def test_an_infinite_output_fails_also_where_no_op_was_seen_to_make_it() -> None:
    infinite = replace(OUTPUT, seen=replace(SEEN, lost=3))
    assert _verdicts(replace(HEALTHY, errors=(infinite,)), "overflow") == [Verdict.FAIL]
    loss = replace(infinite, key=("loss", "", 0))
    assert _verdicts(replace(HEALTHY, errors=(OUTPUT, loss)), "overflow") == [Verdict.FAIL]


def test_an_absorbed_overflow_warns_one_that_reaches_a_result_fails_and_a_mask_is_silent() -> None:
    lost = replace(FAULT, kind=faults.OVERFLOW, examination=Examination(8, lost=2), exact_amax=1e6)
    assert _verdicts(replace(HEALTHY, faults=(lost,)), "overflow") == [Verdict.FAIL]
    assert _verdicts(replace(HEALTHY, faults=(replace(lost, reaches={}),)), "overflow") == [Verdict.WARN]
    assert _verdicts(replace(HEALTHY, faults=(replace(lost, kind=faults.MASK),)), "overflow") == [Verdict.PASS]


def test_an_absorbed_overflow_of_the_scaled_backward_is_silent() -> None:
    """No `GradScaler` sees it: a relu that was off takes it away, and the step is made."""
    lost = replace(
        FAULT, kind=faults.OVERFLOW, where=Where(phase="backward"), examination=Examination(8, lost=2), reaches={}
    )
    scaled = replace(HEALTHY, scale=2.0**16, faults=(lost,))
    assert _verdicts(scaled, "overflow") == [Verdict.PASS]
    assert _verdicts(replace(scaled, scale=1.0), "overflow") == [Verdict.WARN]
    assert _verdicts(replace(scaled, faults=(replace(lost, reaches={"weight": 1.0}),)), "overflow") == [Verdict.FAIL]


def test_values_that_vanish_fail_where_they_reach_a_result_only() -> None:
    for kind, check in ((faults.FLUSH, "flush"), (faults.ZERO, "silent-zero")):
        fault = replace(FAULT, kind=kind, examination=replace(LOSSY, zeroed=6, flushed=1.0))
        assert _verdicts(replace(HEALTHY, faults=(fault,)), check) == [Verdict.FAIL]
        assert _verdicts(replace(HEALTHY, faults=(replace(fault, reaches={}),)), check) == [Verdict.PASS]


def test_integers_that_collide_fail_where_they_are_used() -> None:
    fault = replace(FAULT, kind=faults.COLLISION, elements=3)
    assert _verdicts(replace(HEALTHY, faults=(fault,)), "integer-cast") == [Verdict.FAIL]
    assert _verdicts(replace(HEALTHY, faults=(replace(fault, reaches={}),)), "integer-cast") == [Verdict.WARN]
    assert _verdicts(replace(HEALTHY, whole=2), "integer-cast") == [Verdict.PASS]
    assert _verdicts(HEALTHY, "integer-cast") == [Verdict.SKIP]


def test_headroom_is_growth_and_no_mask_that_passes_through() -> None:
    def verdict(result: float, source: float, phase: str = "forward") -> Finding:
        place = replace(PLACE, phase=phase)
        stats = replace(HEALTHY, largest={(place, "float16"): (result, source)}, scale=65536.0)
        (finding,) = _findings(stats, "headroom")
        return finding

    assert verdict(30000.0, 100.0).verdict is Verdict.WARN
    assert verdict(60000.0, 30000.0).verdict is Verdict.WARN
    assert verdict(65504.0, 65504.0).verdict is Verdict.PASS
    assert verdict(30000.0, 100.0, "backward").verdict is not Verdict.WARN
    slow = verdict(33000.0, 30000.0)  # what grew before is reported where it grew, and is the maximum all the same
    assert (slow.verdict, slow.observed) == (Verdict.PASS, pytest.approx(65504 / 33000))


def test_the_reference_is_judged_by_its_outputs_data_and_ops() -> None:
    bad = replace(OUTPUT, seen=replace(SEEN, exact_nan=4))
    maker = (PLACE, Examination(64, exact_nan=4))
    assert [f.verdict for f in check_reference(HEALTHY)] == [Verdict.PASS]
    (finding,) = check_reference(replace(HEALTHY, errors=(bad,), nonfinite=(maker,)))
    assert (finding.verdict, finding.where, finding.subject) == (Verdict.FAIL, PLACE, "model [float64]")
    (finding,) = check_reference(replace(HEALTHY, errors=(bad,), data=(Values("input", "args.0", 1, 0),)))
    assert "input args.0 holds 1 NaN" in finding.message
    assert [f.verdict for f in check_reference(replace(HEALTHY, errors=(bad,)))] == [Verdict.INCOMPLETE]


def test_switches_that_a_model_leaves_changed_fail() -> None:
    assert _verdicts(HEALTHY, "autocast-state") == []
    left = {"default dtype": ("float32", "float64")}
    assert _verdicts(replace(HEALTHY, left=left), "autocast-state") == [Verdict.FAIL]


def test_a_run_that_raised_says_nothing_else() -> None:
    raised = replace(HEALTHY, raised=Raised(Where("forward", "layer"), "RuntimeError: planted"))
    findings = check_numerics(raised, Limits())
    assert [f.check for f in findings if f.verdict is Verdict.FAIL] == ["low-precision-error"]
    assert Verdict.PASS not in {f.verdict for f in findings}


def test_it_is_always_said_whether_it_ran_also_when_other_checks_were_asked_for() -> None:
    raised = replace(HEALTHY, raised=Raised(Where("forward"), "RuntimeError: planted"))
    assert "low-precision-error" in {f.check for f in check_numerics(raised, Limits(), ["overflow"])}


def test_a_machine_without_a_kernel_is_no_failure_of_the_model() -> None:
    missing = replace(HEALTHY, raised=Raised(Where("forward"), "no kernel", missing=True))
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
    places = tuple(replace(FAULT, where=replace(PLACE, line=n)) for n in range(9))
    findings = _findings(replace(HEALTHY, faults=places), "precision-loss")
    assert len(findings) == 5
    assert "4 further places are left out" in findings[-1].message


def test_an_overflow_of_a_backward_pass_names_the_loss_scale_as_a_cure() -> None:
    """Its line is forward code, which the message does not blame."""
    place = replace(PLACE, phase="backward", op="aten::_to_copy")
    fault = Fault(faults.OVERFLOW, place, "float16", LOSSY, (4, 16), 1e6, 0.0, 1e6, reaches={"gradient w": 1.0})
    stats = replace(HEALTHY, faults=(fault,), sources={("model.py", 3): "y = x.float()"}, scale=128.0)
    (finding,) = _findings(stats, "overflow")
    assert "_to_copy in the backward pass at `y = x.float()`" in finding.message
    assert "torch.amp.GradScaler lower the loss scale (here 128)" in finding.hint
    forward = replace(stats, faults=(replace(fault, where=replace(place, phase="forward")),))
    (finding,) = _findings(forward, "overflow")
    assert "loss scale" not in finding.hint
