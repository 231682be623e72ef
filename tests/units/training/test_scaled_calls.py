"""Training in a callable that depends on the loss scale is found, wherever its scaler comes from; other passes."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scaled_by_hand import bound_times_scale, norm_for_a_log, scaled_first_gradient, split_backward
from torch import nn
from training_loops import amp_loop

import ampcheck
from ampcheck.core.run import Finding, Verdict

Between = Callable[[Any, Any, nn.Module], None]


def judged(call: Callable[[], object]) -> Finding:
    run = ampcheck.audit(call, checks=["scale-invariance"], steps=6, name="call")
    (found,) = [finding for finding in run.findings if finding.check == "scale-invariance"]
    return found


def training(loop: Callable[[], dict[str, Any]], *, steps: int = 6) -> Callable[[], None]:
    """A function that builds a loop and runs it."""

    def train() -> None:
        step = loop()["step"]
        for number in range(steps):
            step(number)

    return train


def clip_each(scaler: Any, optimizer: Any, model: nn.Module) -> None:
    """Clips by a function of its own, which no wrapper of torch.nn.utils sees."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.1 / parameter.grad.norm().clamp(min=0.1))


def clip_late(scaler: Any, optimizer: Any, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    clip_each(scaler, optimizer, model)


def divided_after_update() -> dict[str, Any]:
    """Gradients are unscaled by hand, with the scale of the next step."""

    def step(scaler: Any, optimizer: Any) -> None:
        scaler._check_inf_per_device(optimizer)
        scaler.update()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(scaler.get_scale())
        optimizer.step()

    return amp_loop(step=step)


def clipped(between: Between) -> Callable[[], dict[str, Any]]:
    return lambda: amp_loop(between=between)


def hooked() -> dict[str, Any]:
    loop = amp_loop()
    for parameter in loop["model"].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return loop


def gated(between: Between) -> Callable[[], dict[str, Any]]:
    """Steps whose norm is above a limit are left out."""

    def loop() -> dict[str, Any]:
        shape = amp_loop(step=lambda scaler, optimizer: None)
        model, scaler, optimizer, inner = shape["model"], shape["scaler"], shape["optimizer"], shape["step"]

        def step(number: int) -> float:
            loss = inner(number)
            between(scaler, optimizer, model)
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            if norm < 50:
                scaler.step(optimizer)
            scaler.update()
            return float(loss)

        return {**shape, "step": step}

    return loop


def plateau() -> dict[str, Any]:
    """A scheduler that follows the loss; the scale is read for a log."""
    shape = amp_loop()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(shape["optimizer"], patience=1)

    def step(number: int) -> float:
        shape["scaler"].get_scale()
        loss = shape["step"](number)
        scheduler.step(loss)
        return float(loss)

    return {**shape, "step": step, "scheduler": scheduler}


@pytest.mark.parametrize("loop", [clipped(clip_each), hooked, divided_after_update])
def test_gradients_that_depend_on_the_scale_are_found(loop):
    found = judged(training(loop))
    assert found.verdict is Verdict.FAIL, str(found)
    assert "every loss scale" in found.message
    assert found.where.line


def test_what_a_norm_of_scaled_gradients_decides_is_not_judged_and_its_line_is_named():
    found = judged(training(gated(lambda *_: None)))
    assert found.verdict is Verdict.INCOMPLETE, str(found)
    assert linecache.getline(__file__, found.where.line or 0).strip() == "if norm < 50:"
    assert "unscale" in found.hint


def adversarial(*, unscaled: bool) -> Callable[[], None]:
    """A step of the weights in the direction of scaled gradients, before the loss is computed again."""

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        data = torch.randn(16, 8)
        for _ in range(6):
            optimizer.zero_grad()
            point = data.clone().requires_grad_()
            with torch.autocast("cpu", torch.float16):
                loss = model(point).float().square().mean()
            (gradient,) = torch.autograd.grad(scaler.scale(loss), point)
            moved = data + gradient / (scaler.get_scale() if unscaled else 1.0)
            with torch.autocast("cpu", torch.float16):
                loss = model(moved).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return train


def test_an_adversarial_step_by_scaled_gradients_is_found():
    assert judged(adversarial(unscaled=False)).verdict is Verdict.FAIL
    assert judged(adversarial(unscaled=True)).verdict is Verdict.PASS


def accumulating() -> dict[str, Any]:
    """An optimizer step for each four backward passes."""
    shape = amp_loop(clear=False, step=lambda scaler, optimizer: None, factor=0.25)

    def step(number: int) -> float:
        loss = shape["step"](number)
        if number % 4 == 3:
            shape["scaler"].step(shape["optimizer"])
            shape["scaler"].update()
            shape["optimizer"].zero_grad()
        return float(loss)

    return {**shape, "step": step}


def two_optimizers() -> dict[str, Any]:
    shape = amp_loop(step=lambda scaler, optimizer: None)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (shape["model"][0], shape["model"][2]))

    def step(number: int) -> float:
        loss = shape["step"](number)
        shape["scaler"].step(first)
        shape["scaler"].step(second)
        shape["scaler"].update()
        return float(loss)

    return {**shape, "step": step}


def with_own_check() -> dict[str, Any]:
    """The code leaves out a step with an infinite gradient by itself; large scales overflow."""

    def step(scaler: Any, optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if all(math.isfinite(float(gradient.float().sum())) for gradient in gradients):
            scaler.step(optimizer)
        scaler.update()

    return amp_loop(step=step, factor=100.0)


@pytest.mark.parametrize(
    "loop",
    [
        amp_loop,
        with_own_check,
        clipped(clip_late),
        gated(lambda scaler, optimizer, model: scaler.unscale_(optimizer)),
        plateau,
        accumulating,
        two_optimizers,
        *(split_backward, scaled_first_gradient, bound_times_scale, norm_for_a_log),
        lambda: amp_loop(dtype=torch.bfloat16),
        lambda: amp_loop(init_scale=2.0**40),
    ],
)
def test_healthy_training_passes(loop):
    found = judged(training(loop, steps=16))
    assert found.verdict is Verdict.PASS, str(found)


def test_a_scaler_outside_of_the_callable_is_followed_too():
    for between, verdict in ((clip_each, Verdict.FAIL), (clip_late, Verdict.PASS)):
        step = amp_loop(between=between)["step"]
        assert judged(lambda step=step: [step(number) for number in range(6)]).verdict is verdict


def test_a_scaler_that_is_given_its_state_is_followed_too():
    def loop(between: Between) -> dict[str, Any]:
        shape = amp_loop(between=between)
        shape["scaler"].load_state_dict({**shape["scaler"].state_dict(), "scale": 64.0})
        return shape

    assert judged(training(lambda: loop(clip_each))).verdict is Verdict.FAIL
    assert judged(training(lambda: loop(clip_late))).verdict is Verdict.PASS


def test_what_the_callable_reaches_is_as_the_observed_run_left_it():
    shape, taken = amp_loop(), []

    def train() -> None:
        taken.extend(shape["step"](number) for number in range(6))

    assert judged(train).verdict is Verdict.PASS
    alone = amp_loop()
    assert taken == [alone["step"](number) for number in range(6)]
    assert shape["scaler"].get_scale() == 1024.0
    for here, there in zip(shape["model"].parameters(), alone["model"].parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)


@pytest.mark.parametrize("branches", [False, True])
def test_a_callable_that_draws_what_cannot_be_restored_is_judged_by_its_one_run(tmp_path: Path, branches: bool):
    """Its data depend on a file that each run changes. What its code does with the scale only other runs could tell."""
    file = tmp_path / "runs"
    file.write_text("1")

    def look(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        assert scaler.get_scale() > 0
        assert not branches or all(float(p.grad.norm()) < 1e6 for p in model.parameters() if p.grad is not None)

    def train() -> None:
        runs = int(file.read_text())
        file.write_text(str(runs + 1))
        shape = amp_loop(factor=float(runs), between=look)
        for number in range(6):
            shape["step"](number)

    assert judged(train).verdict is (Verdict.INCOMPLETE if branches else Verdict.PASS)
    assert file.read_text() == "2"


def test_a_callable_that_cannot_run_twice_is_judged_by_its_one_run():
    batches, shape = iter(range(6)), amp_loop()
    assert judged(lambda: [(shape["step"](number), shape["scaler"].get_scale()) for number in batches]).verdict is (
        Verdict.PASS
    )


def test_a_callable_without_a_scaler_runs_once():
    runs = []

    def train() -> None:
        runs.append(1)
        training(lambda: amp_loop(scaled=False, dtype=torch.bfloat16))()

    ampcheck.audit(train)
    assert runs == [1]
