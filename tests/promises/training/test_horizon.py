"""Promise: the forecast looks as far as the user plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck import Finding, UsageError, Verdict


def counts() -> None:
    """Adds 1 in float16 in each step, which stops at 2048; its weights are bfloat16."""
    model, count = nn.Linear(4, 1).bfloat16(), torch.zeros((), dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(8, 4).bfloat16()).float().square().mean().backward()
        optimizer.step()
        count += 1


def of_count(run: ampcheck.Run) -> list[Finding]:
    return [f for f in run.findings if f.check == "stagnation" and "count" in f.message]


def test_a_count_stops_within_the_planned_steps_or_after_them() -> None:
    (found,) = of_count(ampcheck.audit(counts, steps=8, horizon=5000))
    assert found.verdict is Verdict.FAIL
    assert "stops at about 2048" in found.message
    assert "after 5,000 steps" in found.message
    assert not [f for f in of_count(ampcheck.audit(counts, steps=8, horizon=1000)) if f.verdict is Verdict.FAIL]


def test_a_horizon_is_of_training_alone() -> None:
    with pytest.raises(UsageError, match="horizon applies to training loops"):
        ampcheck.audit((nn.Linear(2, 2), (torch.randn(1, 2),)), horizon=10)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    with pytest.raises(UsageError, match="horizon= needs a watch of every op"):
        ampcheck.watch(optimizer, exact=False, horizon=10)
