"""Several scalers, scalers made anew, fused optimizers, gradients of few elements, and losses that overflow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampcheck.audit import audit
from ampcheck.checks.dtype.loss_dtype import nonfinite as check_loss
from ampcheck.checks.training.gradient_underflow import check as check_gradients
from ampcheck.checks.training.loss_scale import check as check_loss_scale
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.core.subject import as_subject
from ampcheck.records.gradients import GradientLoss, GradientStats
from ampcheck.records.scales import LossScaleStats, ScalerStats, ScalerStep
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.observed import observe
from ampcheck.training.scale.stats import in_succession


def scaler_stats(*steps):
    return ScalerStats(True, tuple(ScalerStep(step, scale, 0, 1, new_scale=scale / 2) for step, scale in steps))


def test_scalers_that_follow_each_other_are_one_path():
    one, other = scaler_stats((0, 8.0), (1, 4.0)), scaler_stats((2, 8.0))
    told = in_succession({"scaler": one, "scaler#2": other})
    assert list(told) == ["scaler"]
    assert [step.step for step in told["scaler"].steps] == [0, 1, 2]


def test_scalers_that_are_in_use_together_stay_apart():
    one, other = scaler_stats((0, 8.0), (2, 4.0)), scaler_stats((1, 8.0))
    assert list(in_succession({"scaler": one, "scaler#2": other})) == ["scaler", "scaler#2"]


@pytest.mark.parametrize(("scales", "fails"), [([65536.0] * 9, True), ([65536.0 / 2**k for k in range(9)], False)])
def test_skipping_at_a_scale_that_never_falls_is_a_failure(scales, fails):
    steps = tuple(ScalerStep(step, scale, skipped=1) for step, scale in enumerate(scales))
    stats = LossScaleStats(True, steps, "loop", "float16", None, verified=((64.0, 0.0, False),))
    lines = [one.message for one in check_loss_scale(stats, Limits()) if "never fell" in one.message]
    assert bool(lines) is fails


def test_a_loss_that_overflows_in_half_is_told_with_its_value_in_float64():
    found = check_loss("loop", [1.0, 1.0, 1.0, math.inf, math.inf], {3: 70000.0}, None)
    assert [one.verdict for one in found] == [Verdict.FAIL]
    assert "70000" in found[0].message


@pytest.mark.parametrize(("loss", "exact"), [(1.0, 1.0), (math.inf, math.inf)])
def test_a_loss_that_float64_does_not_have_either_is_not_told(loss, exact):
    assert check_loss("loop", [1.0, loss], {1: exact}, None) == []


def overflowing(wide):
    model = nn.Linear(16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = 12 * torch.ones(128, 16)
    with torch.no_grad():
        model.weight.fill_(0.1)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = (out.float() if wide else out).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}


def test_what_a_step_with_an_infinite_loss_would_have_returned_is_known():
    loop = TrainingLoop(as_subject(overflowing(wide=False)))
    with loop.preserved():
        seen = observe(loop, 2)
    assert seen.losses[0] == math.inf
    assert seen.exact[0] == pytest.approx(128 * 32 * (16 * 1.2) ** 2, rel=0.1)
    assert seen.place(0) is not None


def test_a_loss_in_half_that_overflows_fails_and_in_float32_does_not():
    failed = audit(overflowing(wide=False), checks=("loss-dtype",)).of(Verdict.FAIL)
    assert [one.check for one in failed] == ["loss-dtype"]
    assert audit(overflowing(wide=True), checks=("loss-dtype",)).of(Verdict.FAIL) == ()


def gradient(known, zero, norm):
    return GradientLoss("bias", "bfloat16", "bfloat16", known, known, zero, 0, 0, 0, norm**2, 1.0)


@pytest.mark.parametrize(
    ("one", "fails"),
    [
        (gradient(3, 1, 1e-3), False),  # nearly nothing, and zero by cancellation
        (gradient(3, 3, 1.0), True),
        (gradient(3, 1, 0.5), True),
        (gradient(100, 34, 1e-3), True),
    ],
)
def test_of_few_elements_the_norm_decides_what_was_lost(one, fails):
    verdicts = {found.verdict for found in check_gradients(GradientStats("loop", 0, gradients=(one,)), Limits())}
    assert (Verdict.FAIL in verdicts) is fails


@pytest.mark.parametrize("clip", [False, True])
def test_a_fused_optimizer_that_unscales_inside_sees_the_same_gradients(clip):
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu", 1024.0)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    loop = {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}
    run = audit(loop, checks=["scale-invariance"], steps=6)
    assert [one.verdict for one in run.findings if one.check == "scale-invariance"] == [Verdict.PASS]
