"""The loss scale of FSDP's `ShardedGradScaler` is judged as that of `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import ampcheck
from ampcheck import Verdict


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loop(*, clips: bool = False, targets: float = 1.0, scale: float = 2.0**10) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=scale)
    x, y = torch.randn(64, 16), torch.randn(64, 4) * targets

    def step(i: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def verdicts(parts: dict[str, Any]) -> dict[str, Verdict]:
    checks = ("loss-scale", "scaler-protocol", "scale-invariance")
    return {f.check: f.verdict for f in ampcheck.audit(parts).findings if f.check in checks}


def test_a_sharded_scaler_in_its_window_passes(one_rank: None) -> None:
    assert set(verdicts(loop()).values()) == {Verdict.PASS}


def test_clipping_before_a_sharded_scaler_unscales_fails(one_rank: None) -> None:
    found = verdicts(loop(clips=True))
    assert found["scaler-protocol"] is Verdict.FAIL
    assert found["scale-invariance"] is Verdict.FAIL


def test_a_sharded_scale_below_its_window_is_reported(one_rank: None) -> None:
    assert verdicts(loop(scale=2.0**-20))["loss-scale"] is not Verdict.PASS
