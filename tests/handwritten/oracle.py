"""The judge of the cases: plain float64 runs, no engine.

A run is at fault when it is further from the float64 run than the conditioning of its data explains: rows (the last
dimension) are compared by norm, integers by mean distance, booleans by share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from handwritten.case import Case, arriving
from torch import Tensor

SLACK, FLOOR = 8.0, 32.0
INTEGER_FLOOR = 0.01
MANTISSA = {torch.float16: 11, torch.bfloat16: 8}


def unit_roundoff(low: torch.dtype) -> float:
    return 2.0 ** -MANTISSA[low]


def rounded(low: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a rounding to the digits of `low` that keeps the range of float64."""

    def change(data: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(data.double())
        digits = 2.0 ** MANTISSA[low]
        return torch.ldexp((fraction * digits).round() / digits, exponent)

    return change


def moved(low: torch.dtype, seed: int) -> Callable[[Tensor], Tensor]:
    """Return a move of every value by one unit roundoff, up or down; the global generator stays as it is."""
    generator = torch.Generator().manual_seed(seed)

    def change(data: Tensor) -> Tensor:
        signs = torch.randint(0, 2, data.shape, generator=generator).double() * 2 - 1
        return data.double() * (1 + signs * unit_roundoff(low))

    return change


class Oracle:
    """What float64 says of one case; its runs are made once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.exact = tensors(case.function(torch.float64))
        self._conditioning: dict[torch.dtype, list[list[Tensor]]] = {}

    def severity(self, dtype: torch.dtype, low: torch.dtype) -> float:
        """Return the error of the run in `dtype` in units of the bound for data in `low`: above 1 is a fault."""
        results = tensors(self.case.function(dtype))
        assert len(results) == len(self.exact)
        worst = 0.0
        for index, (result, exact) in enumerate(zip(results, self.exact, strict=True)):
            samples = [sample[index] for sample in self._samples(low)]
            worst = max(worst, ratio(result, exact, samples, unit_roundoff(low)))
        return worst

    def _samples(self, low: torch.dtype) -> list[list[Tensor]]:
        if low not in self._conditioning:
            changes = [rounded(low), moved(low, seed=1), moved(low, seed=2)]
            self._conditioning[low] = [self._run(change) for change in changes]
        return self._conditioning[low]

    def _run(self, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with arriving(change):
            return tensors(self.case.function(torch.float64))


def ratio(result: Tensor, exact: Tensor, samples: list[Tensor], roundoff: float) -> float:
    """Return the largest quotient of error and bound over the rows of one tensor."""
    assert result.shape == exact.shape
    assert exact.isfinite().all()
    assert not exact.is_floating_point() or bool(exact.any())
    if not result.isfinite().all():
        return float("inf")
    if not exact.is_floating_point():
        distances = [(value.double() - exact.double()).abs().mean() for value in (result, *samples)]
        return float(distances[0] / (SLACK * max(distances[1:]) + INTEGER_FLOOR))
    reference = rows(exact)
    conditioning = torch.stack([(rows(sample) - reference).norm(dim=-1) for sample in samples]).amax(0)
    bound = SLACK * conditioning + FLOOR * roundoff * reference.norm(dim=-1)
    error = (rows(result) - reference).norm(dim=-1)
    return float(torch.where(error == 0, 0.0, error / bound).max())


def rows(tensor: Tensor) -> Tensor:
    return tensor.double().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)


def tensors(result: Any) -> list[Tensor]:
    return list(_leaves(result))


def _leaves(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result.detach()
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _leaves(item)
    else:
        yield torch.as_tensor(result)
