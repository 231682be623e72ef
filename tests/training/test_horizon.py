"""Promise: the forecast looks as far as the user plans, or as the lr schedule says, and names what it cannot copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Verdict

Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def counts(schedule: Schedule | None = None) -> None:
    """Adds 1 in float16 in each step, which stops at 2048; its weights are bfloat16."""
    model, count = nn.Linear(4, 1).bfloat16(), torch.zeros((), dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = schedule(optimizer) if schedule is not None else None
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(8, 4).bfloat16()).float().square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        count += 1


def of_count(run: ampcheck.Run) -> list[Finding]:
    return [f for f in run.findings if f.check == "stagnation" and "count" in f.message]


@pytest.mark.slow
def test_a_count_stops_within_the_planned_steps_or_after_them() -> None:
    (found,) = of_count(ampcheck.audit(counts, steps=8, horizon=5000))
    assert found.verdict is Verdict.FAIL
    assert "stops at about 2048" in found.message
    assert "after 5,000 steps" in found.message
    assert not [f for f in of_count(ampcheck.audit(counts, steps=8, horizon=1000)) if f.verdict is Verdict.FAIL]


@pytest.mark.slow
def test_a_longer_schedule_says_the_horizon() -> None:
    run = ampcheck.audit(
        lambda: counts(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30_000, 1e-3)), steps=8
    )
    (found,) = of_count(run)
    assert "after 30,000 steps" in found.message


class Locked:
    """A schedule's factor that cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, step: int) -> float:
        return 1.0


def test_a_schedule_that_cannot_be_copied_is_named() -> None:
    run = ampcheck.audit(lambda: counts(lambda o: torch.optim.lr_scheduler.LambdaLR(o, Locked())), steps=8)
    assert any(what.startswith("LambdaLR of optimizer cannot be copied") for what in run.coverage.unseen)


def test_a_horizon_is_of_training_alone() -> None:
    with pytest.raises(UsageError, match="horizon applies to training loops"):
        ampcheck.audit((nn.Linear(2, 2), (torch.randn(1, 2),)), horizon=10)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    with pytest.raises(UsageError, match="horizon= needs a watch of every op"):
        ampcheck.watch(optimizer, horizon=10)


def follows(dtype: torch.dtype, schedule: Schedule | None) -> Callable[[], None]:
    """Trains with a learning rate that a tensor holds."""

    def trains() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, dtype=dtype), foreach=False)
        scheduler = schedule(optimizer) if schedule is not None else None
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

    return trains


def of_rate(trains: Callable[[], None], horizon: int = 3000) -> list[Verdict]:
    findings = ampcheck.audit(trains, steps=6, horizon=horizon).findings
    return [f.verdict for f in findings if f.check == "stagnation" and "learning rate" in f.message]


DECAYS: dict[str, Schedule] = {
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2000),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3000),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", DECAYS)
def test_a_learning_rate_in_16_bits_that_leaves_its_schedule_fails(name: str) -> None:
    assert of_rate(follows(torch.bfloat16, DECAYS[name])) == [Verdict.FAIL]
    assert of_rate(follows(torch.float32, DECAYS[name])) == []


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "schedule",
    [
        None,
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 500, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    ],
    ids=["none", "halved", "by a function of the step", "fast"],
)
def test_a_learning_rate_in_16_bits_that_follows_its_schedule_is_no_finding(schedule: Schedule | None) -> None:
    assert of_rate(follows(torch.bfloat16, schedule)) == []


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("dtype", "least", "verdicts"),
    [(torch.float16, 1e-7, [Verdict.FAIL]), (torch.float16, 1e-4, []), (torch.float32, 1e-7, [])],
)
@pytest.mark.parametrize("call", [True, False])
def test_a_learning_rate_that_leaves_a_tensor_as_zero_fails(
    dtype: torch.dtype, least: float, verdicts: list[Verdict], call: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=1e-3)
    rates, data = torch.tensor([least, 1e-2], dtype=dtype), torch.randn(8, 4)

    def step(number: int) -> float:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = (rate * (number / 8)).item()  # the first warm-up rate is 0
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def trains() -> None:
        for number in range(4):
            step(number)

    run = ampcheck.audit(trains if call else {"model": model, "optimizer": optimizer, "step": step}, steps=4)
    assert [f.verdict for f in run.findings if f.check == "stagnation" and "learning rate" in f.message] == verdicts
