"""What a report says of a collapse follows from real backward passes: one cause, its op and line, a hint that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.checks import findings
from ampcheck.checks.dtype.loss_dtype import nonfinite as check_loss
from ampcheck.checks.range import mend_nonfinite
from ampcheck.checks.training.loss_scale import check as check_loss_scale
from ampcheck.core.limits import Limits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict, Where
from ampcheck.core.subject import Subject
from ampcheck.records.finite import FiniteStats
from ampcheck.records.scales import GradientHistogram, LossScaleStats, ScalerStep, scale_window
from ampcheck.training.judge import judge_training

FALLING = tuple(ScalerStep(i, 2.0 ** (16 - i), 0, 1, 2.0 ** (15 - i), ("body",)) for i in range(24))
CAST = Where("forward", "0", "aten::_to_copy", "train.py", 14)
WINDOW = scale_window({"body": GradientHistogram({30: 900, 38: 10}, 2.0**38)}, share=0.1)


def loop(
    *, size: float = 1.0, factor: float = 1.0, scaled: bool = True, inside: float = 1.0, fused: bool = False
) -> dict[str, Any]:
    """size: of the input. factor: of the loss, in float32. inside: of a product in the float16 part of backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)) * size

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(data)
            if inside != 1.0:
                output = (output * (1 / inside)) * inside
        loss = output.float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def judged(shape: dict[str, Any], *checks: str) -> Run:
    return judge_training(Plan.of(Subject(shape, name="loop"), checks=checks or None, steps=24))


def of(run: Run, check: str) -> Finding:
    (finding,) = [one for one in run.findings if one.check == check]
    return finding


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_every_step_is_named_as_the_reason_that_no_weight_changed(fused):
    run = judged(loop(factor=1e12, fused=fused), "nonfinite-gradient", "stagnation")
    assert "the scaler skipped every optimizer step" in of(run, "coverage").message
    for check in ("nonfinite-gradient", "stagnation"):
        assert of(run, check).verdict is Verdict.INCOMPLETE
        assert "see loss-scale" in of(run, check).hint


def test_a_loss_that_is_too_large_is_to_be_divided_by_what_the_window_asks_for():
    run = judged(loop(factor=1e12))
    finding = of(run, "loss-scale")
    assert finding.verdict is Verdict.FAIL
    assert "the loss is too large" in finding.hint
    assert "average the loss instead of summing it" in finding.hint
    divisor = 2.0 ** int(finding.hint.partition("divide it by 2^")[2].split(",")[0])
    mended = judged(loop(factor=1e12 / divisor), "loss-scale")
    assert of(mended, "loss-scale").verdict is Verdict.PASS
    assert "the scaler skipped" not in of(mended, "loss-scale").message
    assert (finding.unit, finding.limit) == ("loss scale", 1.0)
    assert str(finding.where).count("backward") == 1
    covered = of(run, "coverage")
    assert covered.verdict is Verdict.WARN
    assert "the scaler skipped every optimizer step" in covered.message
    assert "optimizer that steps" not in covered.hint
    assert "see loss-scale" in covered.hint


@pytest.mark.parametrize("scaled", [True, False])
def test_an_input_that_overflows_in_its_cast_has_one_cause_with_its_line(scaled):
    run = judged(loop(size=1e7, scaled=scaled))
    findings = [of(run, check) for check in ("loss-scale", "overflow", "loss-dtype")]
    for finding in findings:
        assert finding.verdict is Verdict.FAIL
        assert finding.where.phase == "forward"
        assert finding.where.module == "0"
        assert finding.where.op == "aten::_to_copy"
        assert finding.where.file.endswith("test_hints_of_collapse.py")
        assert "the cast overflows" in finding.hint
        assert "module 0 in float32" in finding.hint
        assert "overflow nowhere" not in finding.message
    assert "overflow at every scale that was tried" in findings[0].message


def collapsed(**changes: Any) -> LossScaleStats:
    stats = LossScaleStats(True, FALLING, "loop", "float16", WINDOW, CAST)
    return replace(stats, **changes)


def only(stats: LossScaleStats) -> Finding:
    (finding,) = check_loss_scale(stats, Limits())
    return finding


def test_the_hint_follows_the_real_backward_passes_and_not_the_prediction():
    assert WINDOW.high == 2.0**-23
    assert "divide it by 2^39" in only(collapsed()).hint
    finite = ((2.0**-30, 0.0, False), (2.0**-23, 0.0, True))
    assert "divide it by 2^46" in only(collapsed(verified=finite)).hint
    hopeless = only(collapsed(verified=tuple((scale, 0.0, True) for scale, _, _ in finite)))
    assert "no loss scale mends this" in hopeless.hint
    assert (hopeless.where.op, hopeless.where.line) == (CAST.op, CAST.line)
    serves = only(collapsed(window=None, verified=((2.0**10, 0.0, False),)))
    assert "too large" not in serves.hint


def test_the_window_ends_where_an_op_inside_overflows_however_far_below_the_gradients_that_is():
    """The scaler backs off to the largest scale that is finite: the upper end, if that was measured."""
    message = of(judged(loop(inside=2.0**14), "loss-scale"), "loss-scale").message
    assert "the scale in use, 64, is inside, 0 binades below the upper end" in message


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (CAST, "the cast overflows"),
        (replace(CAST, module=""), "keep train.py:14 in float32"),
        (Where("forward", "head", "aten::mm", "train.py", 3), "keep module head in float32"),
        (Where("backward", "", "aten::mul", "train.py", 3), "keep train.py:3 in float32"),
        (Where("forward", "", "aten::sum", "train.py", 3), "output.float()"),
    ],
)
def test_the_hint_fits_the_op_that_overflows(place, words):
    nan = float("nan")
    (overflow,) = findings(FiniteStats("loop", (nan, nan, nan), (), (), 4, place), Limits())
    (loss,) = check_loss("loop", [nan] * 3, {0: 1.0}, place)
    assert overflow.where == loss.where == replace(place, step=0)
    for hint in (overflow.hint, loss.hint, mend_nonfinite(place)):
        assert words in hint


def test_loss_scale_says_why_gradient_underflow_counts_more_of_the_same_tensor():
    run = judged(loop(factor=1e-6, scaled=False), "gradient-underflow", "loss-scale")
    share, real = of(run, "loss-scale"), of(run, "gradient-underflow")
    assert share.where.module == "0.weight"
    assert real.observed is not None
    assert f"{100 * real.observed:.3g} % in the real backward pass that gradient-underflow counts" in share.message
