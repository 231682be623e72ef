"""Measure a tensor's health: what can be measured, by which path, and why the rest cannot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ampcheck.health import oracle
from ampcheck.health.plan import Plan, plan_for
from ampcheck.health.stats import TensorHealth, Unmeasured


@dataclass(frozen=True, slots=True)
class PendingHealth:
    """Statistics that were computed, or queued on their device, and not yet read.

    ``packed`` is a float64 vector on the tensor's device, or plain floats for a tensor of the CPU; ``plan`` says what
    stands where.
    """

    packed: torch.Tensor | Sequence[float]
    plan: Plan
    numel: int

    def read(self) -> TensorHealth:
        """Return the record. The only place that waits for the device."""
        values = self.packed.tolist() if isinstance(self.packed, torch.Tensor) else self.packed
        return self.plan.unpack(values, self.numel)


def measure_health(
    tensor: torch.Tensor, *, histogram: bool = False, casts: Iterable[torch.dtype | str] = ()
) -> PendingHealth | Unmeasured:
    """Measure without reading: see the package documentation."""
    plan = plan_for(tensor.dtype, tuple(casts), histogram)
    with torch.no_grad():
        return PendingHealth(oracle.pack(tensor.detach(), plan), plan, tensor.numel())


def health_of(
    tensor: torch.Tensor, *, histogram: bool = False, casts: Iterable[torch.dtype | str] = ()
) -> TensorHealth | Unmeasured:
    """Measure and read at once."""
    return measure_health(tensor, histogram=histogram, casts=casts).read()


def read_all(pending: Iterable[PendingHealth | Unmeasured]) -> list[TensorHealth | Unmeasured]:
    """Read."""
    return [p.read() for p in pending]


def alarm(tensor: torch.Tensor) -> torch.Tensor:
    """Alarm."""
    return oracle.alarm(tensor.detach())
