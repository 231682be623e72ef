"""A small model for the tests of callbacks, for scripts too: nothing here imports pytest."""

from __future__ import annotations

import math

import torch
from torch import nn


class Net(nn.Module):
    """Two layers whose forward runs in float16, if asked to. In batch `bad` the input is NaN."""

    def __init__(self, *, half: bool = False, bad: int | None = None, raises: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.half_precision, self.bad, self.raises, self.calls = half, bad, raises, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.calls == self.raises:
            raise ZeroDivisionError
        if self.bad is not None and self.calls >= self.bad:
            x = x * math.nan
        self.calls += 1
        with torch.autocast("cpu", torch.float16, enabled=self.half_precision):
            out = self.second(torch.tanh(self.first(x)))
        return {"loss": out.float().square().mean(), "logits": out.detach()}


def data(count: int = 16) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.zeros(1)} for _ in range(count)]
