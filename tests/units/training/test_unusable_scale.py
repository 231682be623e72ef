"""A loss scale that is 0, infinite, NaN or negative is what `loss-scale` reports, not an error of the audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import amp_loop, mlp

from ampcheck.checks.training.loss_scale import check as check_loss_scale
from ampcheck.core.limits import Limits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.records.scales import GradientHistogram, LossScaleStats, ScalerStep, is_usable, scale_window
from ampcheck.training.judge import judge_training
from ampcheck.training.monitor.judge import check_monitored
from ampcheck.training.monitor.sums import MonitorStats, OptimizerStats
from ampcheck.training.scale.stats import loss_scale_chart, loss_scale_table, window_chart

UNUSABLE = (0.0, -1024.0, float("inf"), float("-inf"), float("nan"), 1e-40)
WINDOW = scale_window({"body": GradientHistogram({-20: 900, 0: 10}, 1.0)}, share=0.05)


def judged(shape: dict[str, Any]) -> Finding:
    run = judge_training(Plan.of(Subject(shape, name="loop"), checks=["loss-scale"], steps=8))
    (finding,) = [one for one in run.findings if one.check == "loss-scale"]
    assert finding.verdict is Verdict.FAIL, str(run)
    return finding


def scaled_loop(scaler: Any, overflows: Callable[[int], bool] = lambda number: False) -> dict[str, Any]:
    """A loop in which a product overflows in the steps that `overflows` names."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(data)
            loss = (output * (1e30 if overflows(number) else 1.0)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


@pytest.mark.parametrize("backoff", [0.0, 2.0**-80])
def test_a_scale_that_collapses_is_a_failure_with_its_step_and_what_overflowed(backoff):
    scaler = torch.amp.GradScaler("cpu", backoff_factor=backoff)
    finding = judged(scaled_loop(scaler, lambda number: 2 <= number < 5))
    assert f"from step {3 if not backoff else 4} on" in finding.message
    assert "after 2^16 in step 0 and" in finding.message
    assert "not finite: " in finding.message
    assert "aten::" in finding.where.op
    assert finding.where.step == (3 if not backoff else 4)


@pytest.mark.parametrize("scale", UNUSABLE)
def test_a_scaler_that_starts_without_a_usable_scale_is_a_failure(scale):
    finding = judged(amp_loop(init_scale=scale))
    assert "from the first step on" in finding.message
    assert "init_scale" in finding.hint


def test_a_scale_of_zero_from_a_checkpoint_is_a_failure():
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "scale": 0.0})
    assert "it is 0 from the first step on" in judged(scaled_loop(scaler)).message


def test_a_scale_that_is_set_to_infinity_is_a_failure():
    class Growing(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None:
            super().update(torch.tensor(2.0**60) * self.get_scale())

    finding = judged(scaled_loop(Growing("cpu", init_scale=4.0)))
    assert "it is inf from step" in finding.message
    assert "growth_factor" in finding.hint


def test_growing_in_every_step_is_no_failure():
    run = judge_training(
        Plan.of(
            Subject(scaled_loop(torch.amp.GradScaler("cpu", growth_interval=1)), name="loop"),
            checks=["loss-scale"],
            steps=8,
        )
    )
    assert not run.of(Verdict.FAIL), str(run)


@pytest.mark.parametrize("scale", UNUSABLE)
def test_tables_and_charts_of_an_unusable_scale_are_drawn(scale):
    steps = (ScalerStep(0, 2.0**15, taken=1, new_scale=scale), ScalerStep(1, scale, taken=1, new_scale=scale))
    stats = LossScaleStats(True, steps, "loop", "float16", WINDOW)
    (finding,) = check_loss_scale(stats, Limits())
    assert finding.verdict is Verdict.FAIL
    assert finding.where.step == 1
    assert loss_scale_table(stats)
    assert loss_scale_chart(stats)
    assert window_chart(stats)


@pytest.mark.parametrize("scale", UNUSABLE)
def test_a_watch_says_the_same(scale):
    optimizer = OptimizerStats("optimizer", 4, 4, attempts=(0, 1))
    stats = MonitorStats("loop", 1, (optimizer,), (), True, (2.0**15, 2.0**15, scale))
    (finding,) = [one for one in check_monitored(stats, Limits()) if one.check == "loss-scale"]
    assert finding.verdict is Verdict.FAIL
    assert "from step 2 on, after 2^15 in step 0" in finding.message
    assert finding.where.step == 2
    usable = replace(stats, scales=(2.0**15, 2.0**15))
    assert not [f for f in check_monitored(usable, Limits()) if f.check == "loss-scale" and f.verdict is Verdict.FAIL]


@pytest.mark.parametrize(("scale", "usable"), [(1.0, True), (2.0**-126, True), (2.0**127, True), (2.0**-149, False)])
def test_a_scale_is_usable_while_float32_holds_its_inverse(scale, usable):
    assert is_usable(scale) is usable
    gradient = nn.Parameter(torch.ones(1))
    gradient.grad = torch.full((1,), scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([gradient]))
    assert (float(gradient.grad) == 1.0) is usable
