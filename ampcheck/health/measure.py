"""Measure a tensor's health: choose the path, read the result when asked."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ampcheck.core.errors import UsageError
from ampcheck.health import cpu, oracle
from ampcheck.health.plan import Plan, carrier_of, plan_for
from ampcheck.health.stats import TensorHealth, Unmeasured
from ampcheck.health.subnormals import flushed_here
from ampcheck.health.values import values_of


@dataclass(frozen=True, slots=True)
class PendingHealth:
    """Statistics that were computed, or queued on their device, and not yet read.

    ``packed`` is a float64 vector on the tensor's device, or plain floats for a tensor of the CPU; ``plan`` says what
    stands where. ``numel`` counts all elements, ``unstored`` those of them that a sparse tensor leaves out.
    """

    packed: torch.Tensor | Sequence[float]
    plan: Plan
    dtype: str
    numel: int
    unstored: int = 0

    def read(self) -> TensorHealth:
        """Return the record. The only place that waits for the device."""
        values = self.packed.tolist() if isinstance(self.packed, torch.Tensor) else self.packed
        return self.unpack(values)

    def unpack(self, values: Sequence[float]) -> TensorHealth:
        """Return the record for ``values``, the packed vector as it was read."""
        return self.plan.unpack(values, self.dtype, self.numel, self.unstored)


def measure_health(
    tensor: torch.Tensor, *, histogram: bool = False, casts: Iterable[torch.dtype | str] = ()
) -> PendingHealth | Unmeasured:
    """Measure the values that ``tensor`` holds on this process, of any shape, in one pass, without synchronising.

    ``histogram`` asks for the counts by exponent, ``casts`` for what a cast to each of these formats would lose.

    Floating-point tensors (64, 32, 16 and 8 bits) are measured in their own dtype. Complex tensors are measured as
    their real view, with two elements for one; integers and booleans as float64 (exact up to 2**53). A DTensor is
    measured by its local shard, without gathering: merge the records of the ranks. Elements that a sparse tensor does
    not store are zeros. What cannot be measured gives ``Unmeasured``, with the reason.

    Gradients, hooks and Dynamo are left alone. Inside a dispatch mode, call it with the mode disabled.

    Raises ``UsageError`` for what is no tensor, and for a cast to what is no floating-point format.
    """
    values = _values_of(tensor)
    if isinstance(values, Unmeasured):
        return values
    path = _path_for(values)
    if isinstance(path, Unmeasured):
        return path
    plan = plan_for(values.dtype, tuple(casts), histogram)
    with torch.no_grad():
        packed = path.pack(_dense(values), plan)
    numel = values.numel()
    unstored = 0
    if tensor.layout not in (torch.strided, torch.jagged):
        unstored = tensor.numel() * (2 if tensor.is_complex() else 1) - numel
    return PendingHealth(packed, plan, str(tensor.dtype).removeprefix("torch."), numel + unstored, unstored)


def health_of(
    tensor: torch.Tensor, *, histogram: bool = False, casts: Iterable[torch.dtype | str] = ()
) -> TensorHealth | Unmeasured:
    """Measure as ``measure_health`` does, and read at once."""
    return measure_health(tensor, histogram=histogram, casts=casts).read()


def read_all(pending: Iterable[PendingHealth | Unmeasured]) -> list[TensorHealth | Unmeasured]:
    """Read several at once, in their order, with one transfer for each device."""
    wanted = list(pending)
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for one in wanted:
        if isinstance(one, PendingHealth) and isinstance(one.packed, torch.Tensor):
            devices.setdefault(one.packed.device, []).append(one.packed)
    values = {device: iter(torch.cat(vectors).tolist()) for device, vectors in devices.items()}
    read: list[TensorHealth | Unmeasured] = []
    for one in wanted:
        if isinstance(one, PendingHealth) and isinstance(one.packed, torch.Tensor):
            read.append(one.unpack(list(itertools.islice(values[one.packed.device], one.plan.width))))
        else:
            read.append(one.read())
    return read


def alarm(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[amax, smallest nonzero magnitude]``, float64, on the tensor's device, without synchronising.

    The cheapest look at a tensor: ``amax`` is NaN if any element is, else infinity if any element is; without a nonzero
    finite element the second is infinity. Raises ``UsageError`` for what ``measure_health`` would not measure.
    """
    values = _values_of(tensor)
    path = values if isinstance(values, Unmeasured) else _path_for(values)
    if isinstance(values, Unmeasured) or isinstance(path, Unmeasured):
        raise UsageError(f"An alarm needs a tensor that can be measured; this one is {path}.")
    with torch.no_grad():
        return path.alarm(_dense(values))


def _values_of(tensor: torch.Tensor) -> torch.Tensor | Unmeasured:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"Health is a tensor's; got {type(tensor).__name__}.")
    with torch.no_grad():
        return values_of(tensor)


class _Path(Protocol):
    """A way to the statistics of a dense tensor whose dtype is its own carrier; each is a module."""

    def pack(self, tensor: torch.Tensor, plan: Plan) -> torch.Tensor | Sequence[float]: ...

    def alarm(self, tensor: torch.Tensor) -> torch.Tensor: ...


def _path_for(values: torch.Tensor) -> _Path | Unmeasured:
    if values.device.type == "cpu":
        why_not = cpu.unavailable()
        if why_not is None:
            return cpu
        if flushed_here():
            return Unmeasured(f"this thread flushes subnormals (torch.set_flush_denormal) and {why_not}")
    elif values.device.type == "cuda":
        return _triton() or oracle
    elif values.device.type == "mps":
        return Unmeasured("mps has no float64; measure a copy on the CPU")
    return oracle


@functools.cache
def _triton() -> _Path | None:
    try:
        from ampcheck.health import triton_kernel
    except ImportError:
        return None
    return triton_kernel


def _dense(values: torch.Tensor) -> torch.Tensor:
    """Return the elements without gaps, in any order, in the dtype that carries them."""
    carried = values.detach().to(carrier_of(values.dtype))
    return carried if _is_dense(carried) else carried.contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
