"""The judge of the cases: plain float64 runs, no engine.

A run is at fault when it is further from the float64 run than the conditioning of its data explains: rows (the last
dimension) are compared by norm, integers by mean distance, booleans by share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from handwritten.case import Case, arriving

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
    """What float64 says of one case; each run is made once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.exact = run(case, torch.float64)
        self._runs: dict[torch.dtype, list[Tensor]] = {}
        self._samples: dict[torch.dtype, list[list[Tensor]]] = {}

    def severity(self, dtype: torch.dtype, low: torch.dtype) -> float:
        """Return the error of the run in `dtype` in units of the bound for data in `low`: above 1 is a fault."""
        if dtype not in self._runs:
            self._runs[dtype] = run(self.case, dtype)
        return self.severity_of(self._runs[dtype], low)

    def severity_of(self, results: list[Tensor], low: torch.dtype) -> float:
        """Return the same for any results of the case, as those of a loop or of an island behind rounded data."""
        samples = self.samples(low)
        assert len(results) == len(self.exact)
        return max(
            ratio(result, exact, [sample[index] for sample in samples], unit_roundoff(low))
            for index, (result, exact) in enumerate(zip(results, self.exact, strict=True))
        )

    def samples(self, low: torch.dtype) -> list[list[Tensor]]:
        """Return float64 runs of data that were rounded to `low` and, twice, moved by one unit roundoff."""
        if low not in self._samples:
            changes = [rounded(low), moved(low, seed=1), moved(low, seed=2)]
            self._samples[low] = [run(self.case, torch.float64, change) for change in changes]
        return self._samples[low]


def run(case: Case, dtype: torch.dtype, change: Callable[[Tensor], Tensor] = lambda data: data) -> list[Tensor]:
    """Run a case in one dtype, with its data changed as they enter."""
    with arriving(change):
        return tensors(case.function(dtype))


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
    """Return the tensors of a case's result, in order and detached."""
    return [tensor.detach() for tensor in _leaves(result)]


def _leaves(result: Any) -> Iterator[Tensor]:
    if isinstance(result, (list, tuple)):
        for item in result:
            yield from _leaves(item)
    else:
        yield torch.as_tensor(result)
