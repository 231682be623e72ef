"""Training loops for `ampcheck audit` under torchrun: DDP and FSDP2 on gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def _loop(
    kind: str,
    reduce: torch.dtype = torch.float32,
    compute: torch.dtype = torch.bfloat16,
    factor: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    model: nn.Module = plain
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(plain)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
        fully_shard(plain[0], mp_policy=policy)
        fully_shard(plain, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "ddp" or compute is torch.float16)
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=kind == "ddp"):
            loss = model(data).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step, **more}


def ddp() -> dict[str, Any]:
    return _loop("ddp")


def syncs_first_micro_batch() -> dict[str, Any]:
    """The last backward pass of a step runs under no_sync: replicas part."""
    loop = _loop("ddp")
    model, optimizer = loop["model"], loop["optimizer"]
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 + dist.get_rank()))

    def step(number: int) -> float:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        with model.no_sync():
            loss = model(data + number).square().mean()
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    return {"model": model, "optimizer": optimizer, "step": step}


def trains() -> None:
    """A function that trains with a rate by rank, and leaves its process group."""
    loop = _loop("ddp")
    model, optimizer = loop["model"], loop["optimizer"]
    for number in range(4):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank() + 10 * number))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + dist.get_rank())
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


def fsdp() -> dict[str, Any]:
    return _loop("fsdp")


def fsdp_in_bfloat16() -> dict[str, Any]:
    return _loop("fsdp", torch.bfloat16, world_size=384)


def fsdp_in_float16_flushes() -> dict[str, Any]:
    return _loop("fsdp", compute=torch.float16, factor=1e-11)
