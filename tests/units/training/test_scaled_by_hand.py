"""Healthy steps that scale, clip or hand on gradients in a way of their own: equal at every scale, so nothing fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from training_loops import amp_loop, failed, mlp

from ampcheck.core.plan import Plan
from ampcheck.core.run import Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.judge import judge_training

CHECKS = ("scaler-protocol", "scale-invariance", "scheduler-skip", "loss-dtype")


def judged(shape: dict[str, Any]) -> Run:
    return judge_training(Plan.of(Subject(shape, name="loop"), checks=CHECKS, steps=6))


def split_backward() -> dict[str, Any]:
    """The loss in one graph, the trunk in another: its gradient is handed on."""
    trunk, head = mlp(seed=1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            whole = trunk(data)
            part = whole.detach().requires_grad_()
            loss = head(part).float().square().mean()
        scaler.scale(loss).backward()
        whole.backward(part.grad)
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return {"model": nn.ModuleList([trunk, head]), "optimizer": optimizer, "scaler": scaler, "step": step}


def scaled_first_gradient() -> dict[str, Any]:
    shape = amp_loop()
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().mean()
        loss.backward(scaler.scale(torch.ones_like(loss)))
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return {**shape, "step": step}


def multiplied_loss() -> dict[str, Any]:
    shape = amp_loop()
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().mean()
        scaler.scale(loss)
        (loss * scaler.get_scale()).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return {**shape, "step": step}


def bound_times_scale() -> dict[str, Any]:
    def between(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01 * scaler.get_scale())

    return amp_loop(between=between)


def norm_for_a_log() -> dict[str, Any]:
    def between(scaler: Any, optimizer: Any, model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))

    return amp_loop(between=between)


@pytest.mark.parametrize(
    "loop", [split_backward, scaled_first_gradient, multiplied_loss, bound_times_scale, norm_for_a_log]
)
def test_what_is_equal_at_every_scale_does_not_fail(loop):
    run = judged(loop())
    assert failed(run) == set(), str(run)
    assert not run.of(Verdict.WARN), str(run)


def test_a_step_that_looks_for_infinities_itself_is_warned_of():
    def direct(scaler: Any, optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        scaler.update()

    run = judged(amp_loop(step=direct))
    assert failed(run) == set()
    assert [f.check for f in run.of(Verdict.WARN)] == ["scaler-protocol"]


def test_a_scheduler_that_follows_a_metric_is_not_judged():
    shape = amp_loop(init_scale=2.0**40)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(shape["optimizer"])
    step = shape["step"]

    def one(number: int) -> float:
        loss = step(number)
        scheduler.step(loss)
        return float(loss)

    assert "scheduler-skip" not in failed(judged({**shape, "scheduler": scheduler, "step": one}))


def test_a_float16_evaluation_beside_training_needs_no_scaler():
    shape = amp_loop(dtype=torch.bfloat16, scaled=False)
    model, step = shape["model"], shape["step"]

    def one(number: int) -> float:
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            model(torch.ones(2, 16))
        return float(step(number))

    run = judged({**shape, "step": one})
    assert not run.of(Verdict.WARN), str(run)


def test_a_clip_before_unscale_is_found_beside_a_batch_that_is_not_finite():
    """A step that every arm skips ends the comparison; what came before it is compared all the same."""
    shape = amp_loop()
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().mean() * (float("nan") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    assert {"scale-invariance", "scaler-protocol"} <= failed(judged({**shape, "step": step}))


def test_where_every_first_step_is_skipped_nothing_is_said_to_be_equal():
    run = judged(amp_loop(factor=float("nan")))
    (found,) = [finding for finding in run.findings if finding.check == "scale-invariance"]
    assert found.verdict is Verdict.INCOMPLETE
