"""Forms in which a case runs: as a callable, behind rounded data, and inside of a training loop over a DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from handwritten.case import Case, arriving
from handwritten.oracle import rounded, tensors


def as_callable(case: Case, dtype: torch.dtype) -> Callable[[], Any]:
    """Return the case in one dtype, without arguments."""

    def call() -> Any:
        return case.function(dtype)

    call.__name__ = call.__qualname__ = f"{case.name}_{str(dtype).removeprefix('torch.')}"
    return call


def as_island(case: Case, low: torch.dtype) -> Callable[[], Any]:
    """Return the float32 twin behind data that were rounded to `low`: what an island within a low model sees."""

    def call() -> Any:
        with arriving(lambda data: rounded(low)(data).to(data.dtype)):
            return case.function(torch.float32)

    call.__name__ = call.__qualname__ = f"{case.name}_island"
    return call


@dataclass
class Trained:
    """What a loop leaves: the model, the case's last results, the losses as the loop logged them."""

    model: nn.Module
    results: list[Tensor]
    losses: list[float]


class TinyModel(nn.Module):
    """A model whose own arithmetic is sound in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def batches(count: int = 3, workers: int = 0) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of `count` batches that draws the same ones each time."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8 * count, 6, generator=generator)
    y = torch.randint(0, 3, (8 * count,), generator=generator)
    order = torch.Generator().manual_seed(8)
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=order, num_workers=workers)


def train(case: Case, dtype: torch.dtype, steps: int = 3) -> Trained:
    """Train a tiny float32 model; the case runs at each step, and its result regularises the weights in the next."""
    return _train(as_callable(case, dtype), steps)


def train_with_island(case: Case, low: torch.dtype, steps: int = 3) -> Trained:
    """Do the same with the float32 twin behind rounded data: nothing is to be found."""
    return _train(as_island(case, low), steps)


def _train(call: Callable[[], Any], steps: int) -> Trained:
    torch.manual_seed(0)
    model, losses, results = TinyModel(), [], None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if results is not None:
            loss = loss + 0.01 * digest(results) * sum(weight.square().mean() for weight in model.parameters())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        results = call()
    return Trained(model, tensors(results), losses)


def digest(results: Any) -> Tensor:
    """Return one number between 0 and 1 that every element moves; what is not finite stays so."""
    parts = []
    for tensor in tensors(results):
        magnitude = tensor.float().abs()
        parts.append((1 - 1 / (1 + magnitude)).mean() + 0 * magnitude.sum())
    return torch.stack(parts).mean()


class Step(nn.Module):
    """A module that runs the case within its forward, for those who audit models instead of callables."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.case, self.dtype, self.model = case, dtype, TinyModel()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * (1 + digest(self.case.function(self.dtype)))
