"""Measure a tensor's health: choose the implementation, read the result later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ampcheck.core.errors import UsageError
from ampcheck.health import cpu, oracle
from ampcheck.health.plan import Plan, carrier_of, plan_for
from ampcheck.health.values import values_of
from ampcheck.records.health import TensorHealth, Unmeasured

Packed: TypeAlias = "torch.Tensor | Sequence[float]"
Pack: TypeAlias = Callable[[torch.Tensor, Plan], Packed]
"""Statistics of a dense tensor whose dtype is its own carrier, in the order of the plan."""


@dataclass(frozen=True, slots=True)
class PendingHealth:
    """Statistics that were computed, or queued on their device, and not yet read.

    ``packed`` is a float64 vector on the tensor's device, or plain floats for a tensor of the CPU, in the order of
    ``plan``. ``numel`` counts all elements, ``unstored`` those of them that a sparse tensor leaves out.
    """

    packed: Packed
    plan: Plan
    dtype: str
    numel: int
    unstored: int = 0

    def read(self) -> TensorHealth:
        """Return the record, after waiting for the device."""
        return self.unpack(self.packed.tolist() if isinstance(self.packed, torch.Tensor) else self.packed)

    def unpack(self, values: Sequence[float]) -> TensorHealth:
        """Return the record for ``values``, the packed vector read from its device."""
        return self.plan.unpack(values, self.dtype, self.numel, self.unstored)


def measure_health(tensor: torch.Tensor, *, histogram: bool = False) -> PendingHealth | Unmeasured:
    """Measure the values of ``tensor`` on this process, of any shape, in one pass, without synchronising.

    ``histogram``: counts by exponent.

    Floating-point tensors (64, 32, 16 and 8 bits) are measured in their own dtype. Complex tensors are measured as
    their real view, with two elements for one; integers and booleans as float64 (exact up to 2**53). A DTensor is
    measured by its local shard, without gathering: merge the records of the ranks. Elements that a sparse tensor does
    not store are zeros. Other tensors give ``Unmeasured``, with the reason.

    Does not affect gradients, hooks and Dynamo. Inside a dispatch mode, call it with the mode disabled.

    Raises ``UsageError`` for an argument that is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"Health is a tensor's; got {type(tensor).__name__}.")
    values = values_of(tensor)
    if isinstance(values, Unmeasured):
        return values
    pack = _implementation(values)
    if isinstance(pack, Unmeasured):
        return pack
    plan = plan_for(values.dtype, histogram)
    packed = pack(_dense(values), plan)
    unstored = 0
    if tensor.layout not in (torch.strided, torch.jagged):
        unstored = tensor.numel() * (2 if tensor.is_complex() else 1) - values.numel()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return PendingHealth(packed, plan, dtype, values.numel() + unstored, unstored)


def health_of(tensor: torch.Tensor, *, histogram: bool = False) -> TensorHealth | Unmeasured:
    """Measure as ``measure_health`` does, and read at once."""
    return measure_health(tensor, histogram=histogram).read()


def _implementation(values: torch.Tensor) -> Pack | Unmeasured:
    kind = values.untyped_storage().device.type  # a tensor may report a device that is emulated on the CPU
    if kind == "cpu":
        return cpu.pack
    if kind == "cuda":
        return _triton() or oracle.pack
    if kind == "mps":
        return Unmeasured("mps has no float64; measure a copy on the CPU")
    return oracle.pack


@functools.cache
def _triton() -> Pack | None:
    try:
        from ampcheck.health.triton_kernel import pack
    except ImportError:
        return None
    return pack


def _dense(values: torch.Tensor) -> torch.Tensor:
    """Return the elements without gaps, in any order, in the dtype that carries them."""
    carried, carrier = values.detach(), carrier_of(values.dtype)
    if carried.dtype is not carrier:
        carried = carried.to(carrier)
    if carried.is_contiguous():
        return carried
    expected = 1
    for stride, size in sorted(zip(carried.stride(), carried.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return carried.contiguous()
            expected *= size
    return carried
