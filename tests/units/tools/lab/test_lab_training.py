"""The main event: what its loop does, what it says of a run that breaks, and that it calls no noise a result."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import exc

from ampcheck import demo
from ampcheck.core.run import Verdict, Where
from ampcheck.records.speed import TWIN, ArmTimes, SpeedStats
from ampcheck.report.charts import draw_chart
from ampcheck.tools.lab import training
from ampcheck.tools.lab.loops import (
    AMP_BFLOAT16,
    AMP_FLOAT16,
    FLOAT32,
    NAIVE,
    Culprit,
    Loop,
    Mode,
    StepStats,
    TrainingRun,
    train,
    windows,
)
from ampcheck.tools.lab.training import TrainingStats


def small(mode: Mode = FLOAT32, **settings: int) -> Loop:
    return Loop(mode, layers=1, width=16, **settings)


# The loop -------------------------------------------------------------------------------------------------------------


def test_no_run_learns_from_the_text_it_is_validated_on() -> None:
    text = demo.corpus()
    letters = sorted(set(text))
    learned, kept = (
        ["".join(letters[code] for code in row) for row in windows(200, 16, seed=0, held_out=held)[0].tolist()]
        for held in (False, True)
    )
    split = int(len(text) * 0.85)
    assert all(part in text[:split] for part in learned)
    assert all(part in text[split:] for part in kept)


def test_targets_are_the_characters_that_follow() -> None:
    given, targets = windows(4, 16, seed=0)
    assert bool((given[:, 1:] == targets[:, :-1]).all())


def test_a_step_that_is_watched_leaves_the_same_weights_as_one_that_is_not() -> None:
    for mode in (FLOAT32, AMP_BFLOAT16):
        one, other = small(mode), small(mode)
        for number in range(2):
            one.step(number)
            other.train(number)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_the_gradient_norm_is_that_of_torch_without_the_loss_scale() -> None:
    loop, scaled = small(), small(Mode("scaled", scaled=True))
    seen = loop.step(0)
    grads = [parameter.grad for parameter in loop.model.parameters() if parameter.grad is not None]
    assert seen.norm == pytest.approx(
        float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))), rel=1e-5
    )
    told = scaled.step(0)
    assert told.scale == 65536.0
    assert told.norm == pytest.approx(seen.norm, rel=1e-5)


def test_a_scaler_that_overflows_is_seen_to_skip_the_step() -> None:
    loop = small(AMP_FLOAT16)
    loop.scaler.scale(torch.ones(1))  # the scale is made when it is first used
    loop.scaler._scale.fill_(2.0**40)  # scaled gradients are float16 on their way back
    seen = loop.step(0)
    assert seen.skipped
    assert math.isnan(seen.norm)


# A run that breaks ----------------------------------------------------------------------------------------------------


def test_naive_float16_breaks_in_the_first_update_where_adamw_divides_by_zero() -> None:
    run = train(small(NAIVE), 3)
    assert run.stopped == 0
    assert len(run.steps) == 1
    assert math.isfinite(run.steps[0].loss)
    assert run.culprit is not None
    assert run.culprit.where == Where("update", op="aten::addcdiv_")


def test_an_overflow_in_forward_is_named_with_its_module() -> None:
    loop = small(NAIVE)
    with torch.no_grad():
        loop.model.blocks[0].up.weight[:, 0] = 60000.0  # times a normalised value beyond 1.1 it is infinite
    run = train(loop, 2)
    assert run.stopped == 0
    assert run.culprit is not None
    assert run.culprit.where.phase == "forward"
    assert run.culprit.where.module == "blocks.0.up"


def test_a_healthy_run_is_validated_at_its_begin_and_end() -> None:
    run = train(small(AMP_BFLOAT16), 3)
    assert run.stopped is None
    assert [step for step, _ in run.validation] == [0, 3]
    assert run.validation[-1][1] < run.validation[0][1]


# What is said of runs -------------------------------------------------------------------------------------------------


def made(mode: Mode, end: float = 2.0, *, compiled: bool = False, stopped: int | None = None) -> TrainingRun:
    steps = tuple(StepStats(4.0 - 0.1 * n, 1.0, 65536.0 * 2**n, n == 2) for n in range(5))
    culprit = Culprit(Where("update", op="aten::addcdiv_"), "float16", 7) if stopped is not None else None
    return TrainingRun(mode, compiled, steps, ((0, 4.0), (5, end)), 0.1, stopped, culprit)


def stats(*runs: TrainingRun, speeds: tuple[SpeedStats, ...] = ()) -> TrainingStats:
    return TrainingStats("cpu", 5, runs, (2.1, 1.95), speeds, {})


def of(found: list, word: str) -> list:
    return [finding for finding in found if word in finding.message]


def test_healthy_runs_pass_and_the_break_of_naive_float16_is_as_expected() -> None:
    found = training.check_training(stats(made(FLOAT32), made(NAIVE, stopped=0), made(AMP_BFLOAT16, 2.01)))
    assert {finding.verdict for finding in found} == {Verdict.PASS}
    (broken,) = of(found, "naive float16 breaks")
    assert broken.where.step == 0
    assert broken.where.op == "aten::addcdiv_"
    assert "2^-25" in broken.message


def test_a_run_that_breaks_a_naive_one_that_does_not_and_one_that_strays_are_warned_of() -> None:
    found = training.check_training(stats(made(FLOAT32), made(NAIVE, 2.0), made(AMP_FLOAT16, 2.5)))
    assert {f.verdict for f in of(found, "naive float16 breaks")} == {Verdict.WARN}
    assert {f.verdict for f in of(found, "autocast float16 ends")} == {Verdict.WARN}
    found = training.check_training(stats(made(FLOAT32), made(AMP_FLOAT16, stopped=3)))
    assert {f.verdict for f in of(found, "autocast float16 stays")} == {Verdict.WARN}


def test_nothing_is_compared_with_a_reference_that_broke() -> None:
    found = training.check_training(stats(made(FLOAT32, stopped=1), made(AMP_BFLOAT16)))
    assert not of(found, "the spread of")


@pytest.mark.parametrize(("factor", "verdict"), [(0.5, Verdict.PASS), (2.0, Verdict.WARN)])
def test_a_slower_arm_is_a_warning_and_never_a_failure(factor: float, verdict: Verdict) -> None:
    arms = (
        ArmTimes("float32", (0.01,) * 40),
        ArmTimes(TWIN, (0.01,) * 40),
        ArmTimes("autocast bfloat16", (factor * 0.01,) * 40),
    )
    found = training.check_training(stats(made(FLOAT32), made(AMP_BFLOAT16), speeds=(SpeedStats("a step", arms),)))
    assert found[-1].verdict is verdict
    assert found[-1].check == "lab-training"


def test_too_few_cycles_decide_nothing() -> None:
    arms = tuple(ArmTimes(name, (0.01,) * 3) for name in ("float32", TWIN, "autocast bfloat16"))
    found = training.check_training(stats(made(FLOAT32), made(AMP_BFLOAT16), speeds=(SpeedStats("a step", arms),)))
    assert found[-1].verdict is Verdict.UNDECIDED


def test_a_run_that_this_machine_cannot_make_is_skipped_with_the_reason() -> None:
    found = training.check_training(replace(stats(made(FLOAT32)), lacking={"float32, compiled": "no compiler"}))
    assert found[-1].verdict is Verdict.SKIP
    assert found[-1].message == "float32, compiled: no compiler"


def test_tables_and_charts_show_every_run_the_break_and_the_skipped_step() -> None:
    shown = stats(made(FLOAT32), made(NAIVE, stopped=4), made(AMP_FLOAT16), made(AMP_FLOAT16, compiled=True))
    (result,) = training.tables(shown)
    assert [row[0] for row in result.rows] == [run.name for run in shown.runs]
    assert "aten::addcdiv_" in str(result.rows[1][-1])
    shown = replace(shown, moving=made(AMP_FLOAT16))
    charts = {chart.title: chart for chart in training.charts(shown)}
    assert [marker.x for marker in charts["Training loss"].markers] == [4.0]
    assert [marker.x for marker in charts["A loss scale that moves"].markers] == [2.0]
    assert charts["A loss scale that moves"].series[0].y[0] == 16.0
    # A compiled run of the same mode would hide the eager one.
    assert [series.group for series in charts["Training loss"].series] == [""] * 3
    assert "compiled" in {series.group for series in charts["Distance from eager float32"].series}
    for title in ("Training loss", "Validation loss", "Gradient norm"):  # so that a run has its colour in all of them
        names = dict.fromkeys(series.label for series in charts[title].series)
        assert list(names) == ["float32", "naive float16", "autocast float16"]
    assert all(chart.x_label and chart.y_label and draw_chart(chart) for chart in charts.values())


def test_a_short_measurement_trains_what_was_asked_and_times_it() -> None:
    seen = training.measure_training(
        steps=4, budget=0.05, width=16, modes=(FLOAT32, AMP_FLOAT16), compiled=(False,), memory=False
    )
    assert [run.name for run in seen.runs] == ["float32", "autocast float16"]
    assert len(seen.seeds) == len(training.SEEDS)
    assert {arm.name for speeds in seen.speeds for arm in speeds.compared} == {"autocast float16"}
    assert len(training.tables(seen)) == 2
    # Precisions are compared under PyTorch's own scale; the one that moves is a run of its own.
    assert {(step.scale, step.skipped) for step in seen.runs[1].steps} == {(65536.0, False)}
    assert seen.moving is not None
    assert max(step.scale for step in seen.moving.steps) > 65536.0


def compilers(inner: Exception) -> Exception:
    """An exception as Dynamo hands on those of its backend."""
    frame = (None,) * (BackendCompilerFailed.__init__.__code__.co_argcount - 3)  # PyTorch 2.7 and later
    return BackendCompilerFailed(torch.compile, inner, *frame)


@pytest.mark.parametrize(
    ("error", "message", "verdict"),
    [
        (RuntimeError("mat1 and mat2 must have the same dtype"), "mat1 and mat2 must have", Verdict.FAIL),
        (RuntimeError("No working C++ compiler found"), "No working C++ compiler", Verdict.FAIL),  # the model's words
        (compilers(exc.InvalidCxxCompiler()), "No working C++ compiler", Verdict.SKIP),
        *(  # PyTorch 2.7 and later
            (compilers(missing(None)), "working triton installation", Verdict.SKIP)
            for missing in [getattr(exc, "TritonMissing", None)]
            if missing is not None
        ),
    ],
)
def test_only_what_this_machine_lacks_is_skipped_and_any_other_error_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str, verdict: Verdict
) -> None:
    def broken(mode: Mode, **settings: object) -> Loop:
        if mode is AMP_BFLOAT16:
            raise error
        return small(mode)

    monkeypatch.setattr(training, "Loop", broken)
    seen = training.measure_training(steps=1, modes=(FLOAT32, AMP_BFLOAT16), compiled=(False,), memory=False)
    found = of(training.check_training(seen), message)
    assert [finding.verdict for finding in found] == [verdict]


def test_a_scale_that_moves_must_be_seen_to_overflow() -> None:
    still = replace(made(AMP_FLOAT16), steps=made(AMP_FLOAT16).steps[:2])
    for run, verdict in ((made(AMP_FLOAT16), Verdict.PASS), (still, Verdict.WARN)):
        found = training.check_training(replace(stats(made(FLOAT32)), moving=run))
        assert [one.verdict for one in of(found, "doubles its scale")] == [verdict]


def timed(*names: str) -> SpeedStats:
    return SpeedStats("a training step", tuple(ArmTimes(name, (0.01,) * 20) for name in ("float32", TWIN, *names)))


def test_the_whole_run_has_charts_with_titles_of_their_own_that_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = (made(FLOAT32), made(FLOAT32, compiled=True), made(NAIVE, stopped=0), made(AMP_FLOAT16), made(AMP_BFLOAT16))
    speeds = (timed("autocast bfloat16"), timed("autocast float16"))
    held = replace(stats(*runs, speeds=speeds), moving=made(AMP_FLOAT16), lacking={"x": "no compiler"})
    monkeypatch.setattr(training, "measure_training", lambda *_, **__: held)
    run = training.run()
    assert not run.failed
    assert run.coverage.total
    titles = [chart.title for chart in run.charts]
    assert len(set(titles)) == len(titles) == 7
    assert all(draw_chart(chart) for chart in run.charts)
    assert all(TWIN in chart.note for chart in run.charts[-2:])
