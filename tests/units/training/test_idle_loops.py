"""A loop that never does what a check looks at is incomplete or a skip, with the reason; it never passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import mlp

from ampcheck.core.plan import Plan
from ampcheck.core.run import Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.judge import judge_training

DATA = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def judged(shape: dict[str, Any], *checks: str) -> Run:
    return judge_training(Plan.of(Subject(shape, name="loop"), checks=checks or None, steps=4))


def loop(
    work: Callable[[nn.Module, Any], float],
    dtype: torch.dtype = torch.float32,
    *,
    frozen: bool = False,
    other: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """frozen: no parameter requires a gradient. other: the optimizer has the parameters of another model."""
    model = mlp().to(dtype).requires_grad_(not frozen)
    optimizer = torch.optim.SGD((mlp(seed=1).to(dtype) if other else model).parameters(), lr=0.1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        return work(model, optimizer)

    return {"model": model, "optimizer": optimizer, "step": step, **more}


def loss_of(model: nn.Module) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(DATA.to(dtype)).float().square().mean()
    return loss


def no_backward(model: nn.Module, optimizer: Any) -> float:
    loss = loss_of(model)
    optimizer.step()
    return float(loss.detach())


def no_step(model: nn.Module, optimizer: Any) -> float:
    loss = loss_of(model)
    loss.backward()
    return float(loss.detach())


def learns(model: nn.Module, optimizer: Any) -> float:
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def another_loss(model: nn.Module, optimizer: Any) -> float:
    loss = loss_of(model) + torch.zeros((), requires_grad=True)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def raises(model: nn.Module, optimizer: Any) -> float:
    raise ValueError("no such batch")


def by_hand(model: nn.Module, optimizer: Any) -> float:
    loss = loss_of(model)
    loss.backward()
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad
    return float(loss.detach())


UPDATES = {"nonfinite-gradient", "stagnation"}
GRADIENTS = {"gradient-underflow", "loss-scale", "loss-dtype", *UPDATES}
IDLE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "no backward pass": ({"work": no_backward}, GRADIENTS),
    "no backward pass of a bfloat16 model": ({"work": no_backward, "dtype": torch.bfloat16}, GRADIENTS),
    "a constant": ({"work": lambda model, optimizer: 0.0}, GRADIENTS),
    "no optimizer step": ({"work": no_step}, UPDATES),
    "no optimizer step of a bfloat16 model": ({"work": no_step, "dtype": torch.bfloat16}, UPDATES),
    "the optimizer of another model": ({"work": learns, "other": True}, UPDATES),
    "no parameter with a gradient": ({"work": another_loss, "frozen": True}, {"gradient-underflow", *UPDATES}),
    "a step that raises": ({"work": raises}, {"gradient-underflow", "loss-scale", "stagnation"}),
}


@pytest.mark.parametrize("name", IDLE)
def test_what_a_loop_never_does_is_incomplete(name):
    given, checks = IDLE[name]
    run = judged(loop(**given))
    incomplete = {finding.check for finding in run.of(Verdict.INCOMPLETE)}
    assert incomplete >= checks, str(run)
    assert all("not judged: " in finding.message for finding in run.of(Verdict.INCOMPLETE))
    assert all(finding.hint for finding in run.of(Verdict.INCOMPLETE)), str(run)
    assert {"coverage"} <= {f.check for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)}, str(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("work", [learns, by_hand])
def test_a_loop_that_learns_is_judged_whole_and_says_on_what(work, dtype):
    run = judged(loop(work, dtype))
    assert not run.of(Verdict.INCOMPLETE), str(run)
    assert not run.of(Verdict.WARN) or dtype is torch.bfloat16, str(run)
    training = ("overflow", "nonfinite-gradient", "gradient-underflow", "stagnation", "master-weights", "loss-dtype")
    passes = [f for f in run.of(Verdict.PASS) if f.check in training]
    assert passes
    assert all(finding.seen for finding in passes), str(run)


def test_a_scaler_that_no_step_uses_is_incomplete():
    run = judged(loop(learns, scaler=torch.amp.GradScaler("cpu")), "scaler-protocol", "scale-invariance")
    told = {finding.check: finding.message for finding in run.of(Verdict.INCOMPLETE)}
    assert "no step of 4 uses it: losses are not scaled" in told["scaler-protocol"]
    assert told["scale-invariance"] == told["scaler-protocol"]
    assert all("scaler.scale(loss).backward()" in finding.hint for finding in run.of(Verdict.INCOMPLETE)), str(run)
    assert not [f for f in run.of(Verdict.PASS) if f.check != "coverage"]


def test_resuming_a_loop_that_changes_nothing_is_incomplete():
    shape = loop(no_step)
    model = shape["model"]
    run = judged({**shape, "save": model.state_dict, "load": model.load_state_dict}, "resume")
    assert [finding.check for finding in run.of(Verdict.INCOMPLETE)] == ["resume"], str(run)
    assert all(finding.hint for finding in run.of(Verdict.INCOMPLETE)), str(run)


def test_master_weights_that_take_up_small_updates_are_a_change():
    torch.manual_seed(0)
    model = nn.Linear(16, 16).bfloat16()
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    x = torch.randn(8, 16).bfloat16()

    def step(number):
        model.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.sub_(parameter.grad.float(), alpha=1e-6)
                parameter.copy_(master)
        return loss.item()

    run = judge_training(
        Plan.of(Subject({"model": model, "optimizer": None, "scaler": None, "masters": masters, "step": step}))
    )
    assert not [f for f in run.findings if f.verdict in (Verdict.WARN, Verdict.INCOMPLETE)], str(run)


def functional(direct):
    """Gradients of `torch.autograd.grad` or of `torch.func`, applied by hand."""
    model = mlp()

    def step(number):
        if direct:
            loss = loss_of(model)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        else:
            values = {name: parameter.detach() for name, parameter in model.named_parameters()}

            def function(parts):
                return torch.func.functional_call(model, parts, (DATA,)).square().mean()

            named, loss = torch.func.grad_and_value(function)(values)
            gradients = [named[name] for name in values]
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        return loss.item()

    return {"model": model, "step": step}


def test_gradients_without_a_backward_pass_are_compared():
    run = judged(functional(direct=True))
    assert not run.of(Verdict.INCOMPLETE), str(run)
    assert not run.of(Verdict.WARN), str(run)
    (found,) = (finding for finding in run.findings if finding.check == "gradient-underflow")
    assert found.verdict is Verdict.PASS


def test_gradients_of_functions_are_named_as_what_was_not_judged():
    run = judged(functional(direct=False))
    incomplete = [finding for finding in run.of(Verdict.INCOMPLETE) if finding.check == "gradient-underflow"]
    assert "torch.func" in incomplete[0].message
    assert not any("nothing was learned" in finding.message for finding in run.findings)
