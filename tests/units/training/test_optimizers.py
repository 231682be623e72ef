"""What an audit says of an optimizer in 16 bits is what becomes of the same steps beside float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.core.run import Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.records.state import Role
from ampcheck.training.loop import TrainingLoop

B16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
CHECKS = ("stagnation", "optimizer-state", "nonfinite-gradient", "overflow")
STEPS = 400
SMALL = 1e-2
"""A loss of a size whose squared gradients float16 does not hold."""


def problem(build, dtype, size=1.0):
    """A small network on 4 batches, its weights and data the same numbers in every dtype. size: of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(4, 16, 8).bfloat16().to(dtype)
    y = torch.sin(x.float() @ torch.randn(8, 2)).bfloat16().to(dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.to(dtype)
    optimizer = build(model.parameters())

    def step(number):
        optimizer.zero_grad()
        loss = (model(x[number % 4]) - y[number % 4]).to(
            torch.promote_types(dtype, torch.float32)
        ).square().mean() * size
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step}


def weights(parts):
    return torch.cat([p.detach().double().flatten() for p in parts["model"].parameters()])


def ended_off(build, dtype, size=1.0):
    """How far 400 steps end from those in float64, by the way that these go; infinite where not finite."""
    exact, narrow = problem(build, F64, size), problem(build, dtype, size)
    start = weights(exact)
    for number in range(STEPS):
        exact["step"](number), narrow["step"](number)
    off = (weights(narrow) - weights(exact)).norm() / (weights(exact) - start).norm()
    return float(off) if off.isfinite() else torch.inf


def audited(build, dtype, size=1.0) -> Run:
    return ampcheck.audit(problem(build, dtype, size), checks=CHECKS)


def fails(run):
    return {finding.check: finding for finding in run.findings if finding.verdict is Verdict.FAIL}


def adam(**options):
    return lambda parameters: torch.optim.Adam(parameters, **options)


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, **options)


LOST = {
    "sgd whose rate is below the spacing": (sgd(lr=1e-4, foreach=False), B16),
    "adam in bfloat16": (adam(foreach=False), B16),
    "adam in float16, eps zero": (adam(foreach=False), F16),
    "adam in float16, foreach": (adam(foreach=True), F16),
    "rmsprop in float16": (lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3), F16),
}

KEPT = {
    "sgd with momentum in float16": (sgd(lr=0.1, momentum=0.9, foreach=False), F16),
    "adadelta in float16": (lambda parameters: torch.optim.Adadelta(parameters), F16),
    "adamax in float16": (lambda parameters: torch.optim.Adamax(parameters, foreach=False), F16),
    "adam in float16, fused, with gradients above 1e-3": (adam(fused=True), F16),
    "adam in float16, an eps above the squares": (adam(betas=(0.9, 0.9), eps=1e-2, fused=True), F16),
}


@pytest.mark.parametrize(("build", "dtype"), LOST.values(), ids=LOST)
def test_an_optimizer_that_ends_elsewhere_than_in_float64_fails(build, dtype):
    assert ended_off(build, dtype) > 0.5
    assert fails(audited(build, dtype))


@pytest.mark.parametrize(("build", "dtype"), KEPT.values(), ids=KEPT)
def test_an_optimizer_that_ends_where_float64_does_passes(build, dtype):
    assert ended_off(build, dtype) < 0.25
    assert not fails(audited(build, dtype))


KERNELS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_second_moments_that_become_zero_are_named(kernel):
    assert ended_off(adam(**kernel), F16, SMALL) > 0.5
    finding = fails(audited(adam(**kernel), F16, SMALL))["optimizer-state"]
    assert "exp_avg_sq" in finding.message
    assert "divided by must not become zero" in finding.message
    assert "float32 parameters" in finding.hint


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("dtype", [B16, torch.float32], ids=str)
def test_second_moments_that_keep_their_range_do_not_vanish(kernel, dtype):
    assert "optimizer-state" not in fails(audited(adam(**kernel), dtype, SMALL))


def test_a_first_moment_that_vanishes_divides_nothing():
    def build(parameters):
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, dampening=0.9999, foreach=False)

    assert "optimizer-state" not in fails(audited(build, F16, SMALL))


def test_a_declared_policy_is_judged_beside_what_vanished():
    parts = {**problem(adam(fused=True), F16, SMALL), "policy": "pure-bf16"}
    run = ampcheck.audit(parts, checks=["optimizer-state"])
    messages = [finding.message for finding in run.of(Verdict.FAIL)]
    assert any("must not become zero" in message for message in messages)
    assert any("pure-bf16" in message for message in messages)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_the_sum_of_adagrad_stops_whatever_its_kernel(kernel):
    run = audited(lambda parameters: torch.optim.Adagrad(parameters, **kernel), B16)
    assert "a sum must go on growing" in fails(run)["stagnation"].message


@pytest.mark.parametrize("kernel", KERNELS[:2], ids=str)
def test_weights_that_an_eps_makes_nan_say_so(kernel):
    hint = fails(audited(adam(**kernel), F16))["nonfinite-gradient"].hint
    assert "an eps of 1e-8 is zero in float16" in hint


def test_an_eps_that_the_format_holds_is_not_blamed():
    run = audited(sgd(lr=1e4), F16)
    assert "eps" not in fails(run)["nonfinite-gradient"].hint.partition("(an eps")[0]


class Contained(torch.optim.Optimizer):
    """Keeps its state in containers, and float32 copies of its parameters beside it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4})
        self.masters = [p.detach().float().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, wide in zip(parameters, self.masters, strict=True):
            sums = self.state[p].setdefault("sums", [torch.zeros_like(p), {"squares": torch.zeros_like(p)}])
            sums[0].add_(p.grad)
            sums[1]["squares"].addcmul_(p.grad, p.grad)
            wide.sub_(p.grad.float(), alpha=1e-4)
            p.copy_(wide)


@cache
def contained():
    parts = problem(Contained, B16)
    parts["step"](0)
    return TrainingLoop(Subject(parts, name="loop")).residents()


def test_state_in_containers_is_followed():
    states = {resident.name for resident in contained() if resident.role is Role.STATE}
    assert {"0.weight.sums.0", "0.weight.sums.1.squares", "optimizer.masters.0"} <= states


def test_master_weights_that_an_optimizer_keeps_beside_its_state_carry_the_updates():
    run = audited(Contained, B16)
    assert not any("updates of parameters" in finding.message for finding in run.of(Verdict.FAIL))


def test_a_sum_in_a_container_that_stops_is_found():
    assert "sums.1.squares" in fails(audited(Contained, B16))["stagnation"].message


class Sized(torch.optim.Optimizer):
    """Steps by the sign of an average; in one step the average is by chance what the weights lose."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-5})
        self.number = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.number += 1
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.copy_(p.grad.sign() * (group["lr"] if self.number == 2 else 1e-2))
                p.add_(average.sign(), alpha=-group["lr"])


def test_a_state_of_the_size_of_what_is_lost_is_no_compensation_in_one_step_of_four():
    finding = fails(audited(Sized, B16))["stagnation"]
    assert "1.weight" in finding.message
    assert "100 % changed nothing" in finding.message


class Twice(torch.optim.Optimizer):
    """Adds two terms to each parameter that nearly cancel, each with a rounding of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-30 * group["lr"])
                p.add_(p.grad, alpha=29 * group["lr"])


def test_two_roundings_in_one_step_are_no_rounding_at_random():
    assert "updates of parameters" in fails(audited(Twice, B16))["stagnation"].message


class Drawn(Twice):
    """Rounds to bfloat16 at random."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                bits = (p.float() - group["lr"] * p.grad.float()).view(torch.int32)
                drawn = torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
                p.copy_((bits + drawn & -65536).view(torch.float32))


def test_rounding_at_random_loses_nothing():
    assert "stagnation" not in fails(audited(Drawn, B16))


class Merged(torch.optim.Optimizer):
    """Multiplies a parameter by its weight decay in the op that adds the update; counts in a tensor of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-5})
        self.state["count"] = torch.zeros(1)

    @torch.no_grad()
    def step(self, closure=None):
        self.state["count"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(p.float() * (1 - 1e-6) - group["lr"] * p.grad.sign())


def test_a_parameter_that_a_decay_multiplies_is_no_average():
    assert "updates of parameters" in fails(audited(Merged, B16))["stagnation"].message
