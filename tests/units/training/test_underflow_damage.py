"""What loses a run fails: gradients that vanish without a loss scale, and a step past the scaler that applies NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_loops import amp_loop, failed

from ampcheck.core.plan import Plan
from ampcheck.core.run import Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.judge import judge_training

B, H = torch.bfloat16, torch.float16
CHECKS = ("gradient-underflow", "loss-scale", "scaler-protocol")
NONE = 3e-4
"""A factor of the loss at which each gradient has nonzero elements, and a good part of what makes them vanishes."""


class Residual(nn.Module):
    """Four residual layers and a head for 50 classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: torch.Tensor = self.head(x)
        return out


def loop(
    factor: float,
    *,
    native: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    wide_loss: bool = True,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    scale: float | None = None,
    enabled: bool = True,
    accumulate: int = 1,
) -> dict[str, Any]:
    """Classification with a loss times `factor`; scale: of a GradScaler, which is stepped through if it is enabled."""
    model = Residual().to(native or torch.float32)
    stepped = optimizer(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=enabled and scale is not None)
    data = torch.randn(256, 8, generator=torch.Generator().manual_seed(1)).to(native or torch.float32)
    labels = torch.arange(256) % 50

    def step(number: int) -> float:
        stepped.zero_grad()
        for _ in range(accumulate):
            with torch.autocast("cpu", autocast or B, enabled=autocast is not None):
                output = model(data)
            loss = F.cross_entropy(output.float() if wide_loss else output, labels) * factor
            scaler.scale(loss / accumulate).backward()
        if scaler.is_enabled():
            scaler.step(stepped)
            scaler.update()
        else:
            stepped.step()
        return float(loss.detach())

    return {"model": model, "optimizer": stepped, "scaler": scaler, "step": step}


def judged(shape: dict[str, Any], *checks: str) -> Run:
    return judge_training(Plan.of(Subject(shape, name="loop"), checks=checks or CHECKS, steps=4))


LOST: dict[str, dict[str, Any]] = {
    "a float16 model": {"native": H},
    "a float16 model with its loss in float16": {"native": H, "wide_loss": False},
    "a float16 model with AdamW": {"native": H, "wide_loss": False, "optimizer": torch.optim.AdamW},
    "float16 autocast": {"autocast": H},
    "float16 autocast with its loss in float16": {"autocast": H, "wide_loss": False},
    "float16 autocast with AdamW": {"autocast": H, "wide_loss": False, "optimizer": torch.optim.AdamW},
    "a scaler that is disabled": {"autocast": H, "wide_loss": False, "scale": 1024.0, "enabled": False},
    "a loss scale that is too low": {"autocast": H, "wide_loss": False, "scale": 1.0},
    "gradients that accumulate": {"autocast": H, "wide_loss": False, "accumulate": 2},
}


@pytest.mark.parametrize("name", LOST)
def test_gradients_that_another_loss_scale_would_save_fail(name):
    run = judged(loop(NONE, **LOST[name]))
    assert {"gradient-underflow", "loss-scale"} <= failed(run), str(run)


HEALTHY: dict[str, dict[str, Any]] = {
    "a float16 model with large gradients": {"native": H, "factor": 1.0},
    "float16 autocast with large gradients": {"autocast": H, "factor": 1.0},
    "a bfloat16 model": {"native": B, "wide_loss": False},
    "bfloat16 autocast": {"autocast": B, "wide_loss": False},
    "float16 autocast and a scaler": {"autocast": H, "scale": 65536.0},
    "a loss in float16 and a scaler": {"autocast": H, "wide_loss": False, "scale": 65536.0},
    "a scaler that is disabled": {"autocast": B, "scale": 1024.0, "enabled": False},
    "gradients that accumulate": {"autocast": H, "scale": 65536.0, "accumulate": 2},
    "float32": {},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_gradients_that_are_saved_do_not_fail(name):
    run = judged(loop(**{"factor": NONE, **HEALTHY[name]}))
    assert failed(run) == set(), str(run)


def test_the_failure_says_by_how_much_and_which_scale_serves():
    run = judged(loop(NONE, native=H, wide_loss=False), "gradient-underflow")
    (finding,) = run.of(Verdict.FAIL)
    assert "the gradients of all parameters together are off by" in finding.message
    assert "without a loss scale, and by" in finding.message
    assert "at loss scale 32768: the rest vanished" in finding.message


def unscaled(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    optimizer.step()
    scaler.update()


def unscaled_and_clipped(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    optimizer.step()
    scaler.update()


def looked_at(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    if all(bool(p.grad.isfinite().all()) for g in optimizer.param_groups for p in g["params"]):
        optimizer.step()
    scaler.update()


def divided_by_hand(scaler: Any, optimizer: Any) -> None:
    for parameter in (p for g in optimizer.param_groups for p in g["params"]):
        parameter.grad.div_(scaler.get_scale())
    optimizer.step()


@pytest.mark.parametrize("step", [unscaled, unscaled_and_clipped, divided_by_hand])
def test_a_step_past_the_scaler_that_applies_infinities_fails(step):
    run = judged(amp_loop(step=step), "scaler-protocol", "scale-invariance")
    (finding,) = run.of(Verdict.FAIL)
    assert "it applied infinite or NaN gradients to 0.weight" in finding.message
    assert "in which the gradient of step 1 was made infinite" in finding.message


@pytest.mark.parametrize("step", [looked_at])
def test_a_step_past_the_scaler_without_damage_is_a_warning(step):
    run = judged(amp_loop(step=step), "scaler-protocol", "scale-invariance")
    assert failed(run) == set(), str(run)
    assert [finding.check for finding in run.of(Verdict.WARN)] == ["scaler-protocol"]


def test_an_optimizer_in_float32_beside_a_scaled_one_is_stepped_plainly():
    shape = amp_loop()
    other = nn.Linear(16, 1)
    plain = torch.optim.SGD(other.parameters(), lr=0.01)
    step = shape["step"]

    def both(number: int) -> float:
        plain.zero_grad()
        other(torch.ones(2, 16)).square().mean().backward()
        plain.step()
        return float(step(number))

    run = judged({**shape, "other": other, "plain": plain, "step": both})
    assert not run.of(Verdict.FAIL), str(run)
    assert not run.of(Verdict.WARN), str(run)


@pytest.mark.parametrize("looks", [False, True])
def test_a_step_that_divides_by_the_scale_itself_fails_unless_it_looks_for_infinities(looks):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(4, 8)

    def step(number):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        for parameter in model.parameters():
            parameter.grad.div_(scaler.get_scale())
        if not looks or all(bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
        return loss.item()

    run = judge_training(Plan.of(Subject({"model": model, "optimizer": optimizer, "scaler": scaler, "step": step})))
    (finding,) = [f for f in run.findings if f.check == "scaler-protocol"]
    assert finding.verdict is (Verdict.WARN if looks else Verdict.FAIL)
    assert "divides by the scale itself" in finding.message
