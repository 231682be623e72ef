"""Loops that cannot be judged, or not all of them: one clear finding or error each, and everything as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training_loops import mlp, state_of

from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.judge import CHECKS, judge_training

DATA = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def loop_of(
    step: Callable[[int, Callable[[], torch.Tensor]], Any], model: nn.Module | None = None, **more: Any
) -> dict[str, Any]:
    """step(number, train): `train()` is one healthy step in mixed precision and gives the loss."""
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(DATA).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    def one(number: int) -> Any:
        return step(number, train)

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": one, **more}


def judged(shape: dict[str, Any], steps: int = 8, checks: Any = None) -> Run:
    """The run; the state must be as it was."""
    before = state_of(shape)
    run = judge_training(Plan.of(Subject(shape, name="loop"), checks=checks, steps=steps))
    assert state_of(shape) == before
    return run


def coverage(run: Run) -> Finding:
    (found,) = [f for f in run.findings if f.check == "coverage" and f.verdict in (Verdict.FAIL, Verdict.WARN)]
    return found


def others(run: Run) -> list[Finding]:
    """Failures besides the one of coverage."""
    return [f for f in run.of(Verdict.FAIL) if f.check != "coverage"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "None"),
        ("0.5", "'0.5'"),
        (torch.ones(3), "Tensor of shape (3,)"),
        ({"loss": 1.0}, "loss"),
        ((1.0, 2.0), "(1.0, 2.0)"),
        (True, "True"),
        (1j, "1j"),
    ],
)
def test_a_step_that_returns_no_float_is_told_so(given, told):
    def step(number, train):
        train()
        return given

    run = judged(loop_of(step), steps=3)
    found = coverage(run)
    assert found.verdict is Verdict.FAIL
    assert "must return its loss, a float" in found.message
    assert told in found.message
    assert not others(run), str(run)


@pytest.mark.parametrize("made", [lambda loss: loss, lambda loss: loss.reshape(1, 1), lambda loss: loss.numpy(), int])
def test_whatever_is_one_number_is_a_loss(made):
    run = judged(loop_of(lambda number, train: made(train())), steps=2, checks=["scaler-protocol"])
    assert not run.failed, str(run)


def test_a_step_that_raises_at_once_is_one_failure_with_its_line():
    def step(number, train):
        raise ValueError("no such batch")

    run = judged(loop_of(step))
    found = coverage(run)
    assert "step 0: ValueError: no such batch" in found.message
    assert found.where.file.endswith("test_bad_loops.py")
    assert found.where.line
    assert not others(run), str(run)
    told = {f.check for f in run.findings if f.verdict is Verdict.INCOMPLETE}
    assert told >= {"gradient-underflow", "loss-scale", "scale-invariance", "stagnation"}


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_step_that_raises_later_is_told_and_what_came_before_is_judged(when):
    def step(number, train):
        if number == 5 and when == "before":
            raise IndexError("list index out of range")
        loss = train()
        if number == 5:
            raise IndexError("list index out of range")
        return float(loss)

    run = judged(loop_of(step))
    found = coverage(run)
    assert "step 5: IndexError" in found.message
    assert found.where.step == 5
    assert not others(run), str(run)
    assert {f.check for f in run.of(Verdict.PASS)} >= {"gradient-underflow", "loss-scale", "scale-invariance"}


def test_a_step_that_raises_in_the_midst_of_its_update_is_undone():
    shape = loop_of(lambda number, train: 0.0)
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]

    def step(number):
        scaler.scale(model(DATA).square().mean()).backward()
        scaler.unscale_(optimizer)
        with torch.no_grad():
            model[0].weight.mul_(2)
        model[2].half()
        if number == 1:
            raise RuntimeError("lost the connection")
        model[2].float()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return 0.0

    run = judged({**shape, "step": step})
    assert "lost the connection" in coverage(run).message


@pytest.mark.parametrize("backward", [False, True])
def test_a_loop_that_never_learns_warns(backward):
    model = mlp()

    def step(number, train):
        loss = model(DATA).square().mean()
        if backward:  # of nothing that the optimizer steps
            (torch.ones(1, requires_grad=True) * 2).sum().backward()
        return loss.item()

    run = judged(loop_of(step, model), steps=3)
    assert not others(run), str(run)
    if not backward:
        assert "no backward pass" in coverage(run).message


def test_parameters_that_are_replaced_are_named():
    model = mlp()

    def step(number, train):
        loss = train()
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        return loss.item()

    run = judged(loop_of(step, model), steps=3)
    found = coverage(run)
    assert found.verdict is Verdict.FAIL
    assert "0.weight" in found.message
    assert "same objects" in found.message


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")]
)
@pytest.mark.parametrize("first", [0, 2])
def test_a_step_that_runs_out_of_memory_is_told_so(error, first):
    def step(number, train):
        if number >= first:
            raise error
        return float(train())

    run = judged(loop_of(step), steps=4)
    found = coverage(run)
    assert "must fit into memory" in found.message
    assert "smaller batch" in found.hint
    assert not others(run), str(run)


def test_data_from_an_iterator_is_judged_by_one_run_without_a_false_alarm():
    batches = iter(torch.randn(10_000, 8, 16))
    shape = loop_of(lambda number, train: 0.0)
    model, optimizer, scaler = shape["model"], shape["optimizer"], shape["scaler"]

    def step(number):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(next(batches)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    run = judged({**shape, "step": step})
    assert not run.failed, str(run)
    passed = {"gradient-underflow", "loss-scale", "scaler-protocol", "master-weights", "scale-invariance"}
    assert {f.check for f in run.of(Verdict.PASS)} >= passed


def test_an_iterator_that_ends_is_told():
    batches = iter(torch.randn(3, 8, 16))
    shape = loop_of(lambda number, train: 0.0)
    model, optimizer = shape["model"], shape["optimizer"]

    def step(number):
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    del shape["scaler"]
    run = judged({**shape, "step": step})
    assert "step 3: StopIteration" in coverage(run).message
    assert not others(run), str(run)


def test_a_loop_with_fewer_batches_than_steps_is_told():
    batches = [DATA, DATA * 2]

    def step(number, train):
        return float(train()) + float(batches[number].sum()) * 0

    run = judged(loop_of(step))
    assert "step 2: IndexError" in coverage(run).message
    assert not others(run), str(run)


def test_a_step_that_differs_each_time_gives_no_false_alarm():
    """Nondeterminism that no seed reaches, as that of atomic additions."""
    noise = iter(torch.rand(10_000).tolist())

    def step(number, train):
        loss = train()
        return float(loss) * (1 + 1e-3 * next(noise))

    run = judged(loop_of(step))
    assert not run.failed, str(run)


def test_a_model_without_storage_is_one_clear_failure():
    model = nn.Linear(16, 1, device="meta")

    def step(number):
        loss = model(DATA.to("meta")).square().mean()
        loss.backward()
        return loss.item()

    run = judged({"model": model, "step": step}, steps=2)
    assert "meta" in coverage(run).message
    assert not others(run), str(run)


def test_a_loop_without_an_optimizer_is_judged_by_its_gradients():
    model = mlp()

    def step(number):
        model.zero_grad()
        loss = model(DATA).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        return loss.item()

    run = judged({"model": model, "step": step}, steps=3)
    assert not run.failed, str(run)
    assert "gradient-underflow" in {f.check for f in run.of(Verdict.PASS)}


def test_a_loop_with_nothing_in_it_is_a_failure_that_tells_what_to_name():
    run = judged({"step": lambda number: 0.0})
    found = run.of(Verdict.FAIL)[0]
    assert "needs a module" in found.message
    assert "'model': model" in found.hint
    assert not others(run)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 3])
def test_an_interrupt_passes_through_and_leaves_everything_as_it_was(interrupt, number):
    def step(now, train):
        loss = train()
        if now == number:
            raise interrupt
        return float(loss)

    shape = loop_of(step)
    before = state_of(shape)
    original = torch.amp.GradScaler.step, torch.autograd._engine_run_backward
    with pytest.raises(interrupt):
        judge_training(Plan.of(Subject(shape)))
    assert state_of(shape) == before
    assert original == (torch.amp.GradScaler.step, torch.autograd._engine_run_backward)


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("number", [0, 3])
def test_a_step_that_exits_is_a_result_and_nothing_that_did_not_run_passes(number, code):
    def step(now, train):
        loss = train()
        if now == number:
            raise SystemExit(code)
        return float(loss)

    original = torch.amp.GradScaler.step, torch.autograd._engine_run_backward
    run = judged(loop_of(step))  # the state is as before
    assert original == (torch.amp.GradScaler.step, torch.autograd._engine_run_backward)
    stopped = coverage(run)
    assert stopped.verdict is Verdict.FAIL
    assert f"step {number}: SystemExit" in stopped.message
    assert stopped.where.step == number
    judged_at_all = {f.check for f in run.of(Verdict.PASS)}
    if number == 0:
        ran = {"coverage", "scaler-protocol", "master-weights", "buffer-dtype", "optimizer-state", "loss-dtype", "tf32"}
        assert judged_at_all <= ran, str(run)
        assert {"gradient-underflow", "loss-scale", "stagnation"} <= {f.check for f in run.of(Verdict.INCOMPLETE)}
    assert "coverage" not in judged_at_all


def test_an_interrupt_in_a_later_stage_leaves_everything_as_it_was():
    calls = itertools.count()

    def step(number, train):
        if next(calls) > 2:
            raise KeyboardInterrupt
        return float(train())

    shape = {**loop_of(step), "save": dict, "load": lambda checkpoint: None}
    before = state_of({**shape, "step": None})
    with pytest.raises(KeyboardInterrupt):
        judge_training(Plan.of(Subject(shape), checks=["resume"], steps=2))
    assert state_of({**shape, "step": None}) == before
    assert next(calls) > 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_no_error_of_the_step(value):
    run = judged(loop_of(lambda number, train: float(train()) * 0 + value), steps=3)
    assert {f.check for f in others(run)} == {"overflow"}, str(run)
    assert "gradient-underflow" in {f.check for f in run.of(Verdict.PASS)}


def test_a_model_whose_weights_are_not_finite_never_passes():
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    run = judged(loop_of(lambda number, train: float(train()), model), steps=4)
    assert "gradient-underflow" not in {f.check for f in run.of(Verdict.PASS)}, str(run)


@pytest.mark.parametrize("slug", CHECKS)
def test_a_loop_that_raises_at_once_says_so_whatever_is_asked(slug):
    def step(number, train):
        raise ValueError("no such batch")

    run = judged(loop_of(step), checks=[slug])
    assert coverage(run).verdict is Verdict.FAIL
    assert not others(run)
