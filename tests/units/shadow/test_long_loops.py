"""Loops of many steps: neither memory nor time grows, and what drifts over hundreds of steps is found at its line."""

import gc
import inspect
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import ampcheck
from ampcheck.core.run import Verdict, Where
from ampcheck.records.faults import CANCELLATION, Fault
from ampcheck.records.results import Examination
from ampcheck.shadow import Shadow
from ampcheck.shadow.recurrence import Recurrence

STEPS = 300


def _watch() -> AbstractContextManager[Any]:
    return ampcheck.watch(fail_on="never")


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"shadow": Shadow, "watch": _watch}


def _resident() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def train(steps: int, after: Callable[[int], None]) -> None:
    """Steps of a small model under autocast. after: called after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        after(number)


def _yardstick() -> float:
    """Seconds that ops of PyTorch take now, without the shadow: the machine may have other work."""
    with _disable_current_modes(), torch.no_grad():
        start, x = time.thread_time(), torch.ones(4, 8)
        for _ in range(200):
            x = x * 1.0
        return time.thread_time() - start


def growth(name: str, steps: int) -> tuple[int, int, float]:
    """Objects and bytes that a block adds after a tenth of its steps; its cost in the last tenth over the first."""
    part = steps // 10
    resident, objects, costs = list[int](), list[int](), list[float]()
    start = time.thread_time()

    def after(number: int) -> None:
        nonlocal start
        costs.append((time.thread_time() - start) / _yardstick())
        if number in (part, steps - 1):
            gc.collect()
            resident.append(_resident())
            objects.append(len(gc.get_objects()))
        start = time.thread_time()

    with BLOCKS[name]():
        train(steps, after)
    cost = statistics.median(costs[-part:]) / statistics.median(costs[5:part])
    return objects[1] - objects[0], resident[1] - resident[0], cost


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize("steps", [200, 5000])
@pytest.mark.parametrize("name", BLOCKS)
def test_memory_and_time_per_step_stay_flat(name: str, steps: int) -> None:
    """In a process of its own: the memory of other tests comes and goes."""
    code = f"import json, test_long_loops; print(json.dumps(test_long_loops.growth({name!r}, {steps})))"
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    objects, resident, cost = json.loads(child.stdout.splitlines()[-1])
    assert objects < steps  # none is left of a step
    assert resident < (8 + steps * 600 / 2**20) * 2**20  # places of its autograd nodes are
    assert cost < 1.5


def moving_average_in_a_buffer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = nn.Module()
    norm.register_buffer("mean", torch.full((16,), 4.0, dtype=dtype))
    for _ in range(STEPS):
        x = torch.randn(64, 16) + 8
        norm.mean.mul_(0.999).add_(x.mean(0).to(dtype), alpha=0.001)  # here


def moving_average_in_a_local(dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    average = torch.full((16,), 4.0, dtype=dtype)
    for _ in range(STEPS):
        x = torch.randn(64, 16) + 8
        average = 0.999 * average + 0.001 * x.mean(0).to(dtype)  # here
    return average.tolist()


def running_loss_in_a_local(dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    total = torch.zeros((), dtype=dtype)
    model = nn.Linear(16, 4)
    for _ in range(2 * STEPS):
        total = total + model(torch.randn(8, 16)).square().mean().detach().to(dtype)  # here
    return total.item()


def gradients_of_micro_batches(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 4).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        loss = (model((torch.randn(8, 16) + 1).to(dtype)).float() + 3).square().mean() / STEPS
        loss.backward()  # here
    optimizer.step()


DRIFTS: tuple[Callable[[torch.dtype], Any], ...] = (
    moving_average_in_a_buffer,
    moving_average_in_a_local,
    running_loss_in_a_local,
    gradients_of_micro_batches,
)


def _line(function: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, text in enumerate(lines) if text.rstrip().endswith("# here"))


@pytest.mark.parametrize("function", DRIFTS, ids=lambda function: function.__name__)
def test_a_bfloat16_accumulator_is_found_at_its_line(function: Callable[[torch.dtype], Any]) -> None:
    with ampcheck.watch(fail_on="never") as watched:
        function(torch.bfloat16)
    failed = [f for f in watched.run.findings if f.verdict is Verdict.FAIL]
    assert (__file__.rpartition("/")[2], _line(function)) in {
        (f.where.file.rpartition("/")[2], f.where.line) for f in failed
    }, [str(f) for f in watched.run.findings]


@pytest.mark.parametrize("function", DRIFTS, ids=lambda function: function.__name__)
def test_the_same_in_float32_is_silent(function: Callable[[torch.dtype], Any]) -> None:
    with ampcheck.watch(fail_on="never") as watched:
        function(torch.float32)
    assert not [f for f in watched.run.findings if f.verdict is Verdict.FAIL]


def test_an_error_that_a_value_keeps_is_no_accident_of_one_execution() -> None:
    def average() -> float:  # a distance of which rounding leaves more than its bound, once: the average keeps it
        weight = torch.ones(4, dtype=torch.bfloat16)
        mean = weight.clone()
        for step in range(600):
            weight.fill_(1.0 if step < 400 else 1.25)
            mean.sub_((1 - min((1 + step) / (10 + step), 0.9999)) * (mean - weight))
        return float(mean.mean())

    run = ampcheck.audit(average, checks=["precision-loss"])
    assert [f.verdict for f in run.findings if f.check == "precision-loss"] == [Verdict.FAIL]


def test_an_error_of_one_execution_in_a_thousand_is_an_accident_and_one_that_recurs_is_not() -> None:
    def faulty(often: int, runs: int, error: float = 1.0) -> bool:
        recurrence, where = Recurrence(), Where("forward", op="aten::sum")
        fault = Fault(CANCELLATION, where, "bfloat16", Examination(4, error=error, limit=0.5), (4,))
        for number in range(1, runs + 1):
            recurrence.runs[where, (4,)] += 1
            if number % often == 0:
                recurrence.note(fault, accumulates=False)
        return recurrence.recurs(fault.key)

    assert faulty(1, 3)
    assert faulty(20, 40)
    assert faulty(50, 3000)
    assert faulty(1000, 1000, error=100.0)
    assert not faulty(1000, 5000)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_that_has_converged_to_zero_is_silent_after_thousands_of_steps(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with ampcheck.watch(fail_on="never") as watched:
        for _ in range(3000):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(16, 32)).square().mean()
            loss.backward()
            optimizer.step()
    assert not watched.run.failed
