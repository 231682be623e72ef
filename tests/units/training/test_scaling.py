"""A stated window of loss scales is true: real backward passes inside it lose nothing, and just outside they do."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from training_loops import amp_loop, demo_loop, mlp

from ampcheck.checks.training.loss_scale import check as check_loss_scale
from ampcheck.core.limits import Limits
from ampcheck.core.plan import Plan
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject
from ampcheck.demo import CharTransformer, batch
from ampcheck.records.scales import FEW, ScaleWindow
from ampcheck.training.judge import judge_training
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.observed import observe
from ampcheck.training.scale.stats import measure_loss_scale

LIMITS = Limits()


def window_of(subject: Subject) -> ScaleWindow:
    loop = TrainingLoop(subject)
    with loop.preserved():
        seen = observe(loop, 1)
    (scales,) = measure_loss_scale(loop, seen.gradients, seen.events, LIMITS)
    assert scales.window is not None
    return scales.window


class Plain:
    """A backward pass in float16 autocast at any scale, against a copy in float64; nothing of ampcheck's."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self.model, self.loss = model, loss
        wide = copy.deepcopy(model).double()
        loss(wide, torch.float64).backward()
        self.exact = [parameter.grad for parameter in wide.parameters()]
        single = copy.deepcopy(model)
        loss(single, torch.float32).backward()
        # What float32 does not know is rounding noise, which no scale keeps.
        self.known = [
            (e != 0) & ((p.grad.double() - e).abs() <= e.abs() / 2)
            for p, e in zip(single.parameters(), self.exact, strict=True)
        ]

    def backward(self, scale: float) -> nn.Module:
        model = copy.deepcopy(self.model)
        with torch.autocast("cpu", torch.float16):
            loss = self.loss(model, torch.float32)
        (loss * scale).backward()
        return model

    def noise(self, scale: float) -> float:
        """The worst share of a parameter's gradients that are off by all of their size: flushed, or the rounding noise
        that subnormal gradients upstream leave in their place."""
        shares, counts = [], []
        for parameter, exact, known in zip(self.backward(scale).parameters(), self.exact, self.known, strict=True):
            wanted = exact * scale
            lost = known & ((parameter.grad.double() - wanted).abs() >= wanted.abs())
            shares.append(int(lost.sum()))
            counts.append(int(known.sum()))
        large = [lost / count for lost, count in zip(shares, counts, strict=True) if count >= FEW]
        return max([*large, sum(shares) / sum(counts)])

    def at(self, scale: float) -> tuple[float, bool]:
        """The worst share that a parameter loses, and whether any gradient is not finite."""
        model = self.backward(scale)
        worst, over, gone, whole = 0.0, False, 0, 0
        for parameter, exact, known in zip(model.parameters(), self.exact, self.known, strict=True):
            grad = parameter.grad
            over = over or not bool(grad.isfinite().all())
            count = int(known.sum())
            lost = max(0, int((known & (grad == 0)).sum()) - int(((exact == 0) & (grad != 0)).sum()))
            gone, whole = gone + lost, whole + count
            if count >= FEW:
                worst = max(worst, lost / count)
        return max(worst, gone / whole), over


def holds(window: ScaleWindow, plain: Plain, *, outside: bool = True) -> None:
    """What is stated is so in the middle and at the upper end, and at the lower one but for what vanishes on the way to
    the measured gradients; two powers of two beyond an end it is not."""
    assert not window.empty
    low = min(window.needed + 5, window.allowed)
    for exponent in {low, (window.needed + window.allowed) // 2, window.allowed}:
        lost, over = plain.at(math.ldexp(1.0, exponent))
        assert lost <= LIMITS.underflow, f"2^{exponent}"
        assert not over, f"2^{exponent}"
    if outside:
        assert plain.noise(math.ldexp(1.0, window.needed - 2)) > LIMITS.underflow
        assert plain.at(math.ldexp(1.0, window.allowed + 2))[1]


def test_the_window_of_the_demo_is_true_at_every_power_of_two():
    subject = demo_loop(layers=1, size=2)
    window = window_of(subject)
    data = batch(2, 64, seed=0)
    plain = Plain(subject.shape["model"], lambda model, dtype: at_dtype(model, data, dtype))
    assert isinstance(subject.shape["model"], CharTransformer)
    holds(window, plain)
    for exponent in range(window.needed + 5, window.allowed, 4):
        lost, over = plain.at(math.ldexp(1.0, exponent))
        assert lost <= LIMITS.underflow
        assert not over


def at_dtype(model: CharTransformer, data: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    logits = model(*data)[0]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return nn.functional.cross_entropy(logits.to(wide).flatten(0, 1), data[1].flatten())


@settings(max_examples=6)
@example(912, 1.5, 6)  # noise stands where gradients were flushed
@given(st.integers(0, 1000), st.floats(-18, 6), st.integers(4, 40))
def test_the_window_of_a_random_network_is_true(seed, size, width):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    data, factor = torch.randn(16, 16), 2.0**size
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=256.0)

    def loss_of(one: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        out = one(data.to(dtype))
        return out.to(dtype).square().mean() * factor

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, torch.float32)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    shape = {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}
    holds(window_of(Subject(shape)), Plain(model, loss_of))


def test_the_scale_in_use_is_judged_against_the_window():
    for scale, verdict in ((2.0**-20, Verdict.FAIL), (1024.0, Verdict.PASS)):
        run = judge_training(Plan.of(Subject(amp_loop(init_scale=scale)), checks=["loss-scale"], steps=3))
        (found,) = [f for f in run.findings if f.check == "loss-scale"]
        assert found.verdict is verdict, found.message


def test_a_step_that_is_skipped_names_the_parameter_and_the_op():
    run = judge_training(Plan.of(Subject(amp_loop(init_scale=2.0**40)), checks=["loss-scale"], steps=40))
    (found,) = [f for f in run.findings if f.check == "loss-scale"]
    assert "steps, first step 0, not finite" in found.message
    assert "first in " in found.message
    assert found.verdict is Verdict.PASS


def test_bfloat16_needs_no_window():
    loop = TrainingLoop(Subject(amp_loop(dtype=torch.bfloat16)))
    with loop.preserved():
        (scales,) = measure_loss_scale(loop, observe(loop, 1).gradients, [], LIMITS)
    assert scales.window is None
    assert [f.verdict for f in check_loss_scale(scales, LIMITS)] == [Verdict.SKIP]


def test_two_scalers_have_a_path_each():
    one, two = mlp(seed=1), mlp(seed=2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two))
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (256.0, 1024.0)]

    def step(number):
        for model, optimizer, scaler in ((one, first, scalers[0]), (two, second, scalers[1])):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.ones(2, 16)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return 0.0

    shape = {"models": [one, two], "optimizers": [first, second], "scalers": scalers, "step": step}
    run = judge_training(Plan.of(Subject(shape), checks=["loss-scale"], steps=3))
    assert len([f for f in run.findings if f.check == "loss-scale"]) == 2
    assert not run.failed


@pytest.mark.parametrize("init_scale", [2.0**4, 2.0**16])
def test_the_window_does_not_depend_on_the_scale_in_use(init_scale):
    window = window_of(Subject(amp_loop(init_scale=init_scale)))
    expected = window_of(Subject(amp_loop(init_scale=2.0**10)))
    assert (window.needed, window.allowed) == (expected.needed, expected.allowed)
