"""Promise: gradients of a later phase are compared at several loss scales, as those of the first steps are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampcheck.audit import audit
from ampcheck.core.run import Verdict
from ampcheck.training.gradients.invariance import steps_to_new_passes
from ampcheck.training.protocol.events import Act, Event

Phase = Callable[[nn.Module, Any, torch.Tensor, dict[str, torch.Tensor]], None]

SCALE = 256.0


def importances(scaled: bool) -> Phase:
    """Squares of gradients, which a penalty multiplies from then on."""

    def compute(model: nn.Module, scaler: Any, x: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
        model.zero_grad()
        loss = model(x).square().mean()
        (scaler.scale(loss) if scaled else loss).backward()
        kept.update({name: p.grad.detach().square() for name, p in model.named_parameters()})

    return compute


def sensitivities(scaled: bool) -> Phase:
    """The same with `torch.autograd.grad`, and their magnitudes."""

    def compute(model: nn.Module, scaler: Any, x: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
        loss = model(x).square().mean()
        found = torch.autograd.grad(scaler.scale(loss) if scaled else loss, list(model.parameters()))
        kept.update({name: grad.abs() for (name, _), grad in zip(model.named_parameters(), found, strict=True)})

    return compute


def failed(phase: Phase, begins: int) -> bool:
    torch.manual_seed(0)
    model, kept = nn.Linear(8, 1), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    anchor = [p.detach().clone() for p in model.parameters()]

    def step(i: int) -> float:
        if i == begins:
            phase(model, scaler, x, kept)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = (out.float() - 1).square().mean()
        penalties = [
            (kept[name] * (p - old).square()).sum()
            for (name, p), old in zip(model.named_parameters(), anchor, strict=True)
            if name in kept
        ]
        scaler.scale(loss + sum(penalties)).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    shape = {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step, "kept": kept, "steps": 12}
    run = audit(shape, checks=("scale-invariance",))
    return any(finding.verdict is Verdict.FAIL for finding in run.findings)


@pytest.mark.every(4)
@pytest.mark.parametrize("begins", [1, 5])
@pytest.mark.parametrize("phase", [importances, sensitivities])
def test_scaled_gradients_of_a_phase_are_found_whenever_it_begins(phase, begins):
    assert failed(phase(scaled=True), begins)
    assert not failed(phase(scaled=False), begins)


def passes(*lines: int) -> list[Event]:
    """A backward pass in each step, in these lines."""
    return [Event(Act.BACKWARD, step, file="train.py", line=line) for step, line in enumerate(lines)]


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        ([1] * 12, 0),
        ([1, 2, 1, 2, 1, 2, 1], 0),
        ([1, 1, 1, 2, 1, 1], 5),
        ([1, 1, 1, 1, 1, 2, 3], 7),
        ([1] * 20 + [2], 0),
    ],
    ids=["one line", "lines that take turns", "the first step after", "the first of two", "too late"],
)
def test_steps_reach_the_first_new_pass_and_are_few(lines, steps):
    assert steps_to_new_passes(passes(*lines)) == steps
