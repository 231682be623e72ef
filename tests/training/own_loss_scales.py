"""Loops with a loss scale of their own, by how they test gradients before a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Test = Callable[[Sequence[Tensor]], bool]

TESTS: dict[str, Test] = {
    "isfinite of each": lambda grads: all(bool(grad.isfinite().all()) for grad in grads),
    "isfinite of the norm": lambda grads: bool(torch.isfinite(torch.stack([g.norm() for g in grads]).norm())),
    "a number": lambda grads: math.isfinite(sum(float(grad.float().sum()) for grad in grads)),
    "isinf or isnan": lambda grads: not any(bool((g.isinf() | g.isnan()).any()) for g in grads),
    "compares": lambda grads: all(bool((g.abs() != torch.inf).all() and (g == g).all()) for g in grads),
}


def own_loss_scale(
    test: Test, *, unscale_first: bool = False, skips: bool = True, backs_off: bool = True
) -> Callable[[], None]:
    """A loop with a dynamic loss scale by hand; the first scales overflow on the way to the weights."""

    def loop() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        x = torch.randn(64, 8)
        with torch.no_grad():
            model[2].weight.mul_(30)
        optimizer, scale = torch.optim.SGD(model.parameters(), lr=1e-4), 2.0**16
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(x).float(), x.roll(1, 1)) * 4
            (loss * scale).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if unscale_first:
                for grad in grads:
                    grad.div_(scale)
            if skips and not test(grads):
                scale /= 16 if backs_off else 1
                continue
            if not unscale_first:
                for grad in grads:
                    grad.div_(scale)
            optimizer.step()

    return loop
