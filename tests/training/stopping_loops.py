"""Loops with one narrow tensor that will stop, and where it really stops when they run long enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from narrow_loops import measured
from torch import nn

from ampcheck.records.stagnation import TensorUpdates

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OBSERVED, STEPS = 4, 10_000
ELEMENTS = 32

Parts = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """make: the loop in a dtype. tensor: the name of the tensor that stops, looked up by `value`. by: what is compared:
    the `value` at which and the `steps` after which it stops; its `distance` from the same loop in float32; how
    far a target that grows by `drift` of itself in each step is when it first carries the tensor along (`leaves`)."""

    kind: str
    name: str
    dtype: torch.dtype
    make: Callable[[torch.dtype], Parts]
    tensor: str
    value: Callable[[Parts], torch.Tensor]
    by: tuple[str, ...] = ("value", "steps")
    drift: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}"


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _looped(change: Callable[[int], None], **parts: Any) -> Parts:
    """A step that changes tensors of its own beside a model in float32 that learns nothing."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(number: int) -> float:
        with torch.no_grad():
            change(number)
        return 0.0

    return {"model": model, "optimizer": optimizer, "step": step, **parts}


def batch_norm(momentum: float, rows: int, *, fixed: bool = False) -> Callable[[torch.dtype], Parts]:
    """Running statistics of data with a mean of 2 and a deviation of 3."""

    def make(dtype: torch.dtype) -> Parts:
        norm = nn.BatchNorm1d(ELEMENTS, momentum=momentum, affine=False).to(dtype)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)

        def step(number: int) -> float:
            norm(_random(rows, ELEMENTS, seed=0 if fixed else number).mul(3.0).add(2.0).to(dtype))
            return 0.0

        return {"model": norm, "optimizer": optimizer, "step": step}

    return make


def optimizer(kind: Callable[..., Any], lr: float = 0.0, **options: Any) -> Any:
    """Parameters whose gradient is the same in each step."""

    def make(dtype: torch.dtype) -> Parts:
        model = nn.Module()
        model.weight = nn.Parameter(_random(ELEMENTS).to(dtype))
        slope = _random(ELEMENTS, seed=1).to(dtype)
        optimizer = kind(model.parameters(), lr=lr, **options)

        def step(number: int) -> float:
            optimizer.zero_grad()
            (model.weight * slope).sum().backward()
            optimizer.step()
            return 0.0

        return {"model": model, "optimizer": optimizer, "step": step}

    return make


def targets(drift: float, number: int) -> torch.Tensor:
    """What an average follows."""
    return (_random(ELEMENTS).abs() + 0.5) * (1.0 + drift * number)


def average(change: Callable[[torch.Tensor, torch.Tensor], Any], start: float = 1.0, drift: float = 0.0) -> Any:
    """An average that begins at `start` of what it follows."""

    def make(dtype: torch.dtype) -> Parts:
        mean = (start * targets(drift, 0)).to(dtype)
        return _looped(lambda number: change(mean, targets(drift, number).to(dtype)), mean=mean)

    return make


def lerp(weight: float) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    return lambda mean, value: mean.lerp_(value, weight)


def mul_add(decay: float) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    return lambda mean, value: mean.mul_(decay).add_(value, alpha=1.0 - decay)


def total(increment: Callable[[int], torch.Tensor]) -> Callable[[torch.dtype], Parts]:
    def make(dtype: torch.dtype) -> Parts:
        total = torch.zeros(1, dtype=dtype)
        return _looped(lambda number: total.add_(increment(number).to(dtype)), total=total)

    return make


def mean_of_all(dtype: torch.dtype) -> Parts:
    mean = torch.full((ELEMENTS,), 3.0, dtype=dtype)

    def step(number: int) -> None:
        values = 3.0 + torch.empty(ELEMENTS).uniform_(-1, 1, generator=torch.Generator().manual_seed(number))
        mean.add_((values.to(dtype) - mean) / (number + 1))

    return _looped(step, mean=mean)


def _state(key: str) -> Callable[[Parts], torch.Tensor]:
    return lambda parts: parts["optimizer"].state[parts["model"].weight][key]


def _part(key: str) -> Callable[[Parts], torch.Tensor]:
    return lambda parts: parts[key]


def _running_var(parts: Parts) -> torch.Tensor:
    return parts["model"].running_var


ADAM = torch.optim.Adam
SGD = torch.optim.SGD
SECOND = "weight.exp_avg_sq", _state("exp_avg_sq")
MOMENTUM = "weight.momentum_buffer", _state("momentum_buffer")
VARIANCE = "running_var", _running_var
MEAN, TOTAL = ("mean", _part("mean")), ("total", _part("total"))

CASES = (
    Case("statistics", "batch norm, momentum 0.01", B16, batch_norm(0.01, 256, fixed=True), *VARIANCE),
    Case("statistics", "batch norm, momentum 0.001", B16, batch_norm(0.001, 256, fixed=True), *VARIANCE),
    Case("statistics", "batch norm, momentum 0.001", F16, batch_norm(0.001, 256, fixed=True), *VARIANCE),
    Case("statistics", "batch norm, momentum 0.01, new data", B16, batch_norm(0.01, 1024), *VARIANCE, ("distance",)),
    Case("second moment", "Adam, beta2 0.999", B16, optimizer(ADAM), *SECOND),
    Case("second moment", "Adam, beta2 0.99", B16, optimizer(ADAM, betas=(0.9, 0.99)), *SECOND),
    Case("second moment", "Adam fused, beta2 0.999", B16, optimizer(ADAM, fused=True), *SECOND),
    Case("second moment", "Adam, beta2 0.999", F16, optimizer(ADAM), *SECOND),
    Case("momentum", "SGD, momentum 0.99", B16, optimizer(SGD, momentum=0.99), *MOMENTUM),
    Case("moving average", "lerp_ by 0.001 from zero", B16, average(lerp(0.001), start=0.0), *MEAN),
    Case("moving average", "lerp_ by 0.01 from above", B16, average(lerp(0.01), start=3.0), *MEAN),
    Case("moving average", "mul_ 0.999, add_ from zero", F16, average(mul_add(0.999), start=0.0), *MEAN),
    Case("moving average", "lerp_ by 0.001, leaves", B16, average(lerp(0.001), drift=5e-4), *MEAN, ("leaves",), 5e-4),
    Case("moving average", "lerp_ by 0.01, leaves", B16, average(lerp(0.01), drift=5e-5), *MEAN, ("leaves",), 5e-5),
    Case("moving average", "lerp_ by 0.001, leaves", F16, average(lerp(0.001), drift=5e-5), *MEAN, ("leaves",), 5e-5),
    Case("sum", "a counter", B16, total(lambda number: torch.ones(1)), *TOTAL),
    Case("sum", "a counter", F16, total(lambda number: torch.ones(1)), *TOTAL),
    Case("sum", "increments of 0.37", B16, total(lambda number: torch.full((1,), 0.37)), *TOTAL),
    Case("sum", "a running loss", F16, total(lambda number: 0.7 + 0.07 * _random(1, seed=number)), *TOTAL),
    Case("sum", "Adagrad", B16, optimizer(torch.optim.Adagrad), "weight.sum", _state("sum")),
    Case("mean of all", "(x - mean) / n", B16, mean_of_all, *MEAN, ("steps",)),
)


def predicted(case: Case) -> TensorUpdates:
    """What the first steps say of the tensor."""
    stats = measured({**case.make(case.dtype), "horizon": STEPS}, OBSERVED)
    (tensor,) = (tensor for tensor in stats.tensors if tensor.name == case.tensor)
    return tensor


def observed(case: Case, steps: int = STEPS) -> dict[str, float]:
    """Where the tensor really stops in a long run: the typical element."""
    parts, wide = case.make(case.dtype), case.make(F32)
    loops = (parts, wide) if "distance" in case.by else (parts,)
    values = [torch.empty(0)]
    for number in range(steps):
        for loop in loops:
            loop["step"](number)
        values.append(case.value(parts).clone())
    moved = torch.stack(values[2:]) != torch.stack(values[1:-1])  # in the steps from 1 on
    now, order = values[-1].double(), torch.arange(2.0, steps + 1)[:, None]
    found = {
        "value": float(now.abs().median()),
        "steps": float((moved * order).amax(0).median()) - OBSERVED,
    }
    if "distance" in case.by:
        exact = case.value(wide).double()
        found["distance"] = float(((exact - now).abs() / torch.maximum(exact.abs(), now.abs())).median())
    if "leaves" in case.by:
        first = moved.double().argmax(0) + 1
        left = [(float(targets(case.drift, int(n))[i]) / float(values[1][i])) - 1.0 for i, n in enumerate(first)]
        found["leaves"] = float(torch.tensor(left).median())
    return found


def pairs(case: Case, steps: int = STEPS) -> dict[str, tuple[float, float]]:
    """Predicted and observed, by what is compared."""
    tensor, real = predicted(case), observed(case, steps)
    stop = tensor.stop
    assert stop is not None, tensor
    expected = {"value": stop.value, "steps": stop.steps, "distance": stop.distance, "leaves": stop.distance}
    return {name: (float(expected[name]), real[name]) for name in case.by}
