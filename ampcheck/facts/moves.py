"""Moves of data that enters: by one unit roundoff, with random signs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch

from ampcheck.records.results import MOVE

_SIGNS = (1 << 18) + 3
"""Elements of the pattern of random signs. It is applied from a random position on, and repeated."""

_SAMPLED = 1 << 16
"""Elements from which a sample decides whether entering data holds whole numbers."""


class Moves:
    """Moves data with random signs of a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._entered = 0

    def drawn(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """`move` with the signs that are next now, for later."""
        self._entered += 1
        return partial(self.move, number=self._entered)

    def move(self, values: torch.Tensor, number: int | None = None) -> torch.Tensor:
        """Flat data moved by `MOVE`; what a format holds exactly, such as masks, counters and scales, has no error."""
        if values.numel() >= _SAMPLED:
            sample = values[:: values.numel() // 1024]
            if not bool((sample.round() == sample).any()):
                return self.shake(values, number)
        integers = values.round() == values
        return torch.where(integers, values, self.shake(values, number))

    def shake(self, values: torch.Tensor, number: int | None = None) -> torch.Tensor:
        """Flat values times 1 plus or minus `MOVE`. number: of the signs, by default the next."""
        if number is None:
            number = self._entered = self._entered + 1
        first, numel = (number * 40503) % _SIGNS, values.numel()
        factors = _pattern(self._seed, values.device)[first : first + _SIGNS]
        if numel <= _SIGNS:
            return values * factors[:numel]
        shaken, whole = torch.empty_like(values), numel - numel % _SIGNS
        torch.mul(values[:whole].view(-1, _SIGNS), factors, out=shaken[:whole].view(-1, _SIGNS))
        torch.mul(values[whole:], factors[: numel - whole], out=shaken[whole:])
        return shaken


@lru_cache(maxsize=8)
def _pattern(seed: int, device: torch.device) -> torch.Tensor:
    """Random factors 1 plus or minus `MOVE`, twice; drawing them takes longer than a small model runs."""
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = torch.randint(0, 2, (_SIGNS,), generator=generator, dtype=torch.float32, device="cpu").mul_(2).sub_(1)
    return signs.mul_(MOVE).add_(1).to(device).repeat(2)
