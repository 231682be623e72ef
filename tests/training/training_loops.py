"""Training loops for the tests: small, real, each with one knob."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from ampcheck import Run, Subject, Verdict
from ampcheck.demo import CharTransformer, batch


def mlp(width: int = 16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def amp_loop(
    *,
    between: Callable[[Any, Any, nn.Module], None] = lambda scaler, optimizer, model: None,
    dtype: torch.dtype = torch.float16,
    scaled: bool = True,
    clear: bool = True,
    step: Callable[[Any, Any], Any] | None = None,
    init_scale: float = 1024.0,
    factor: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    """A step in PyTorch's own order. between: what is done with the gradients before the step; step: instead of
    `scaler.step(optimizer); scaler.update()`; factor: of the loss."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=init_scale)
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

    def one(number: int) -> float:
        if clear:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = model(data).float().square().mean() * factor
        scaler.scale(loss).backward()
        between(scaler, optimizer, model)
        if step is None:
            scaler.step(optimizer)
            scaler.update()
        else:
            step(scaler, optimizer)
        return float(loss.detach())

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": one, **more}


def demo_loop(
    dtype: torch.dtype | None = torch.float16, *, scaled: bool = True, layers: int = 2, size: int = 8
) -> Subject:
    """The demo's training step: AdamW, autocast to `dtype`, a scaler; size: of the batch."""
    torch.manual_seed(0)
    model = CharTransformer(layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def step(number: int) -> float:
        characters, targets = batch(size, 64, seed=number)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(characters, targets)[1]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return Subject({"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}, name="demo")


def plainly(value: Any) -> Any:
    """A value as plain data with every bit of its tensors, to compare a state by; identity of tensors included."""
    if isinstance(value, torch.Tensor):
        stored = value.detach()
        stored = stored.coalesce().to_dense() if stored.layout is torch.sparse_coo else stored
        raw = b"" if stored.is_meta else stored.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        grad = plainly(value.grad) if value.is_leaf and value.grad is not None else None
        return id(value), str(value.dtype), tuple(value.shape), value.requires_grad, raw, grad
    if isinstance(value, dict):
        return id(value), [(repr(key) if isinstance(key, str) else id(key), plainly(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple, set, deque)):
        return id(value) if isinstance(value, (list, deque)) else 0, [plainly(one) for one in value]
    if isinstance(value, nn.Module):
        skipped = ("_modules", "_compiled_call_impl")
        parts = [
            (name, id(part), plainly({k: v for k, v in vars(part).items() if k not in skipped})[1])
            for name, part in value.named_modules()
        ]
        return id(value), parts
    if isinstance(value, (torch.optim.Optimizer, torch.amp.GradScaler)):
        return id(value), [(key, plainly(one)) for key, one in vars(value).items()]
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return id(value), [(key, plainly(one)) for key, one in vars(value).items() if key != "optimizer"]
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    return value if isinstance(value, (int, float, str, bytes, bool, type(None))) else id(value)


def state_of(shape: dict[str, Any]) -> Any:
    """Everything named in a loop's mapping, and the generators of random numbers, as plain data."""
    generators = torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())
    return [(name, plainly(one)) for name, one in shape.items()], generators


def failed(run: Run) -> set[str]:
    """The checks that fail."""
    return {finding.check for finding in run.of(Verdict.FAIL)}
