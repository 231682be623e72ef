"""Promise: gradients are judged to the last step, and those that are cleared before they are used do not count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from narrow_loops import F32, data, net
from torch import nn

from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.judge import judge_training

CHECKS = ("gradient-underflow", "loss-scale")


def judged(shape, steps=10, checks=CHECKS) -> Run:
    return judge_training(Plan.of(Subject(shape, name="loop"), checks=checks, steps=steps))


def failures(run: Run, check: str) -> list[Finding]:
    return [finding for finding in run.findings if finding.verdict is Verdict.FAIL and finding.check == check]


def weighted(weight: Callable[[int], float], scale: float = 64.0):
    """The loss of a second head has a weight that depends on the step."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 4), nn.Linear(16, 4)
    x, y = data(F32)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            heads = first(x), second(x)
        loss = (heads[0].float() - y).square().mean() + weight(i) * (heads[1].float() - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"first": first, "second": second, "optimizer": optimizer, "scaler": scaler, "step": step}


@pytest.mark.parametrize(
    "weight", [lambda i: min(i, 3) * 1e-9, lambda i: 1.0 if i < 4 else 1e-9], ids=["rises", "falls"]
)
def test_a_loss_that_vanishes_after_the_first_step_is_found_at_its_step(weight):
    run = judged(weighted(weight))
    (found,) = failures(run, "gradient-underflow")
    assert "second.weight" in found.message
    assert found.where.step == 9
    assert failures(run, "loss-scale")


@pytest.mark.parametrize(
    "weight", [lambda i: min(i, 3) * 1e-1, lambda i: 1e-9 if i % 4 == 1 else 1.0], ids=["rises", "passes"]
)
def test_a_loss_that_is_large_enough_or_vanishes_now_and_then_does_not_fail(weight):
    run = judged(weighted(weight))
    assert not [f for f in run.findings if f.verdict is Verdict.FAIL], str(run)
    assert "up to step 9" in next(f.message for f in run.findings if f.check == "gradient-underflow")


def test_gradients_that_overflow_and_are_cleared_before_they_are_used_pass():
    """The generator's loss gives the discriminator gradients that nobody uses."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 16), nn.Linear(16, 4)
    x, y = data(F32)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in (first, second)]

    def step(i):
        with torch.autocast("cpu", torch.float16):
            out = second(first(x))
        (out.float() * 1e6).sum().backward()
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (second(first(x)).float() - y).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    run = judged({"first": first, "second": second, "optimizers": optimizers, "step": step}, 3)
    assert not failures(run, "loss-scale"), str(run)


def idle(rate=0.1, zero=False, dtype=torch.float32):
    model, (x, y) = net(dtype), data(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(i):
        optimizer.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        for parameter in model.parameters() if zero else ():
            parameter.grad.zero_()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}


@pytest.mark.parametrize(("shape", "still"), [(idle(0.0), True), (idle(zero=True), True), (idle(), False)])
def test_steps_that_change_no_bit_of_any_weight_are_reported(shape, still):
    run = judged(shape, 4, ("coverage", "stagnation", "nonfinite-gradient"))
    warned = [f for f in run.of(Verdict.WARN) if "no bit of any weight changed" in f.message]
    assert bool(warned) is still
    assert bool(run.of(Verdict.INCOMPLETE)) is still
