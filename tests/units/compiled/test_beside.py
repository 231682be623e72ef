"""From the record of the compiled run of an audit to its findings."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.compiled.accuracy.checks import CHECKS, check_accuracy
from ampcheck.core.arm import Arm
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Verdict
from ampcheck.records.accuracy import AccuracyStats, Exceptions
from ampcheck.records.results import ResultError
from ampcheck.shadow import Examination
from ampcheck.shadow.compare import with_verdict
from ampcheck.shadow.freedom import Freedom

VALUES = ("overflow", "nonfinite-gradient", "precision-loss", "silent-zero", "flush", "headroom")
U = 2.0**-8
SEEN = Examination(64, error=0.002, spread=0.004)
OUTPUT = ResultError(("output", "", 0), "bfloat16", SEEN, U, eager=SEEN, judged=64)
GRADIENT = ResultError(("gradient", "layer.weight", 0), "float32", SEEN, U, norm=0.001, eager=SEEN, judged=64)
FAR = Examination(64, flagged=1, error=0.9, spread=0.004, limit=0.1, impact=0.9)
HEALTHY = AccuracyStats(
    "model",
    Arm("bfloat16", "compiled"),
    "bfloat16",
    errors=(OUTPUT, GRADIENT),
    graphs=1,
    beside=True,
    coverage=Coverage({"graphs": 1}),
)


def verdicts(stats: AccuracyStats, limits: Limits | None = None) -> dict[str, Verdict]:
    return {f.check: f.verdict for f in check_accuracy(stats, limits or Limits())}


def judged(error: ResultError) -> AccuracyStats:
    return replace(HEALTHY, errors=(with_verdict(error, Freedom()), GRADIENT))


def test_every_check_says_something_and_a_healthy_run_passes() -> None:
    assert set(verdicts(HEALTHY)) == {
        *CHECKS,
        "overflow",
        "nonfinite-gradient",
        "precision-loss",
        "silent-zero",
        "flush",
        "headroom",
    }
    assert set(verdicts(HEALTHY).values()) == {Verdict.PASS, Verdict.SKIP}
    assert {f.check for f in check_accuracy(HEALTHY, Limits(), ["overflow"])} == {
        "overflow", "compiled-exception", "coverage"
    }  # fmt: skip


def test_compiled_code_is_at_fault_where_eager_mode_is_within_its_bounds() -> None:
    far = judged(replace(OUTPUT, seen=FAR))
    assert verdicts(far)["compiled-error"] is Verdict.FAIL
    assert verdicts(far)["compiled-gradient"] is Verdict.PASS
    assert verdicts(far, Limits(precision=100.0))["compiled-error"] is Verdict.PASS
    assert verdicts(judged(replace(OUTPUT, seen=FAR, eager=FAR)))["compiled-error"] is not Verdict.FAIL
    near = judged(replace(OUTPUT, seen=replace(SEEN, error=0.1)))
    assert verdicts(near)["compiled-error"] is Verdict.PASS
    assert verdicts(near, Limits(precision=0.5))["compiled-error"] is Verdict.FAIL
    both = judged(replace(OUTPUT, seen=replace(SEEN, error=0.1), eager=replace(SEEN, error=0.1)))
    assert verdicts(both, Limits(precision=0.5))["compiled-error"] is Verdict.PASS


def test_what_lies_beyond_its_bound_is_a_loss_of_precision_whatever_eager_mode_gives() -> None:
    for eager in (SEEN, FAR):
        assert verdicts(judged(replace(OUTPUT, seen=FAR, eager=eager)))["precision-loss"] is Verdict.FAIL
    unlike = replace(judged(replace(OUTPUT, seen=FAR)), incomparable="two runs differ")
    assert verdicts(unlike)["precision-loss"] is Verdict.INCOMPLETE
    assert verdicts(unlike)["compiled-error"] is Verdict.SKIP


def test_what_is_not_finite_fails_as_an_overflow_or_a_gradient() -> None:
    lost = replace(SEEN, lost=3)
    found = verdicts(judged(replace(OUTPUT, seen=lost, lost=3)))
    assert (found["overflow"], found["compiled-error"]) == (Verdict.FAIL, Verdict.FAIL)
    gradient = with_verdict(replace(GRADIENT, seen=lost, lost=3), Freedom())
    found = verdicts(replace(HEALTHY, errors=(OUTPUT, gradient)))
    assert (found["nonfinite-gradient"], found["compiled-gradient"]) == (Verdict.FAIL, Verdict.FAIL)


def test_a_machine_without_a_compiler_is_no_failure_and_a_run_that_raised_says_nothing_else() -> None:
    missing = replace(HEALTHY, errors=(), exceptions=Exceptions(compiled="no compiler", missing="no compiler"))
    assert set(verdicts(missing).values()) == {Verdict.SKIP}
    raised = verdicts(replace(HEALTHY, errors=(), exceptions=Exceptions(compiled="ValueError: planted")))
    assert raised.pop("compiled-exception") is Verdict.FAIL
    assert set(raised.values()) == {Verdict.SKIP}
