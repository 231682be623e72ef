"""A model may be traced in a block that is followed, as `SummaryWriter.add_graph` does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck import Verdict


def train(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).to(device)
    torch.jit.trace(model, torch.randn(2, 3, 8, 8, device=device), check_trace=False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(device)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            loss = model(torch.randn(2, 3, 8, 8, device=device)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float16)])
def test_training_after_a_trace_is_judged(device: str, dtype: torch.dtype) -> None:
    run = ampcheck.audit(lambda: train(device, dtype), device=device)
    assert run.of(Verdict.FAIL) == ()
    assert run.coverage.seen["optimizer steps"] >= 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_under_emulation_equals_the_model() -> None:
    with ampcheck.emulate("cuda"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).cuda()
        x = torch.randn(2, 3, 4).cuda()
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
