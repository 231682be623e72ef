"""A clock whose seconds are drawn, for steps that say how long they take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class SimulatedClock:
    """Steps return their true seconds; each block is disturbed by a factor of its own."""

    def __init__(self, noise: float = 0.02, seed: int = 0, tails: float | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.noise, self.tails = noise, tails

    def prepare(self, call: Callable[[], object] | None) -> None:
        pass

    def block(self, call: Callable[[], object], calls: int) -> float:
        true = sum(float(call()) for _ in range(calls))  # type: ignore[arg-type]
        drawn = self.random.normal() if self.tails is None else self.random.standard_t(self.tails)
        return true * float(np.exp(self.noise * drawn))

    def conditions(self) -> dict[str, float]:
        return {"load": 1.0}

    def effort(self) -> None:
        return None


def taking(seconds: float) -> Callable[[], float]:
    """A step of so many seconds."""
    return lambda: seconds
