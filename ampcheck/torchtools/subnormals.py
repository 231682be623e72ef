"""Survival of subnormals on a device: probed, since it depends on compilers and flags and no API reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ampcheck.core.formats import FORMATS, format_of

_LENGTH = 64  # enough for the vectorised loop, which may differ from the scalar one
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class SubnormalSupport:
    """Survival of subnormals of one dtype on one device; ``None`` where the device lacks the operation.

    ``multiply``: halving the smallest normal value gives a subnormal. ``add``: so does a difference of two normal
    values. ``cast``: so does a cast from float32 (float64 for float32, float32 for float64: a subnormal is read, then).
    """

    device: str
    dtype: str
    multiply: bool | None
    add: bool | None
    cast: bool | None


def measure_subnormal_support(device: torch.device | str = "cpu") -> dict[str, SubnormalSupport]:
    """Probe every floating-point dtype that has subnormals on ``device``; keyed by the dtype's name. Synchronises.

    Float8 dtypes have no arithmetic of their own in PyTorch, so that only the cast is probed. On the CPU the result is
    that of the calling thread, which ``torch.set_flush_denormal`` changes.
    """
    dtypes = {f: getattr(torch, f.name, None) for f in FORMATS.values() if f.has_subnormals}
    return {
        f.name: _probe(torch.device(device), dtype)
        for f, dtype in dtypes.items()
        if isinstance(dtype, torch.dtype) and dtype.itemsize * 8 == f.bits
    }


def flushed_here() -> bool:
    """Return whether the calling CPU thread reads float32 subnormals as zero."""
    return not _nonzero(_filled(torch.float32, 1, torch.device("cpu")).to(torch.float64))


def _probe(device: torch.device, dtype: torch.dtype) -> SubnormalSupport:
    normal = 1 << format_of(dtype).mantissa_bits  # the code of the smallest normal value; half as much again is 1.5 x
    source, code = torch.float32, 1  # read by a cast to float64
    if dtype is not torch.float64:
        # Half the smallest normal value, a power of two, by its code: arithmetic might flush it already.
        source = torch.float64 if dtype is torch.float32 else torch.float32
        code = format_of(source).encode(format_of(dtype).smallest_normal / 2)

    def survives(operation: Callable[[], torch.Tensor]) -> bool | None:
        try:
            return _nonzero(operation())
        except (RuntimeError, TypeError, NotImplementedError):
            return None

    return SubnormalSupport(
        str(device),
        str(dtype).removeprefix("torch."),
        multiply=survives(lambda: _filled(dtype, normal, device) * 0.5),
        add=survives(lambda: _filled(dtype, normal + normal // 2, device) - _filled(dtype, normal, device)),
        cast=survives(lambda: _filled(source, code, device).to(dtype)),
    )


def _filled(dtype: torch.dtype, code: int, device: torch.device) -> torch.Tensor:
    """Return a vector of one bit pattern, untouched by any floating-point operation."""
    return torch.full((_LENGTH,), code, dtype=_WORDS[dtype.itemsize], device="cpu").to(device).view(dtype)


def _nonzero(values: torch.Tensor) -> bool:
    """Compare the bits: a floating-point comparison would flush too."""
    return bool((values.view(_WORDS[values.dtype.itemsize]).cpu() != 0).all())
