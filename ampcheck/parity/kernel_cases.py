"""The cases on which a kernel is tried: shapes around tiles, layouts, ranges up to the end of the format, ill
conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ampcheck.core.errors import UsageError, brief
from ampcheck.torchtools.pytree import map_tensors, tensors

Arguments: TypeAlias = tuple[Any, ...]

SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 257)
"""Sizes around the tiles of kernels, and between them."""

_STEEP = 64.0
"""By how much the offset of ill-conditioned inputs exceeds what varies in them."""


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments for a kernel, by the name of what is special about them."""

    name: str
    arguments: Arguments


def cases_of(inputs: Any, sizes: Sequence[int] = SIZES) -> Iterator[Case]:
    """The cases of inputs: of a tuple of arguments, a list of such, or a function of a size that returns one."""
    if callable(inputs):
        if not sizes or any(type(size) is not int or size < 0 for size in sizes):
            raise UsageError(f"sizes must be whole numbers from 0 on, at least one; found {sizes!r:.80}")
        for size in sizes:
            try:
                arguments = inputs(size)
            except Exception as error:
                raise UsageError(f"inputs({size}) raised {brief(error)}") from error
            yield from _variants(f"size {size}", arguments, full=size == max(sizes))
        return
    if not isinstance(inputs, (torch.Tensor, tuple, list)) or (isinstance(inputs, list) and not inputs):
        raise UsageError(
            "inputs must be a tuple of arguments, a list of such, a function of a size that returns one, or a "
            f"strategy; found {inputs!r:.80}"
        )
    for number, arguments in enumerate(inputs if isinstance(inputs, list) else [inputs]):
        title = f"inputs {number}" if isinstance(inputs, list) else "the inputs"
        yield from _variants(title, arguments, full=True)


def _variants(title: str, given: Any, *, full: bool) -> Iterator[Case]:
    """Arguments as they are, and with other values and in other layouts. full: ranges and conditions too."""
    arguments = given if isinstance(given, tuple) else (given,)
    yield Case(title, arguments)
    if not any(t.numel() > 1 for _, t in tensors(arguments)):
        return
    for name, layout in _LAYOUTS:
        yield Case(f"{title}, {name}", _mapped(layout, arguments, every=True))
    for name, values in _VALUES if full else ():
        yield Case(f"{title}, {name}", _mapped(values, arguments))


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], arguments: Arguments, *, every: bool = False) -> Arguments:
    """The arguments with a change of each floating tensor, or of `every` tensor."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        suits = (every or tensor.is_floating_point()) and tensor.numel() > 0 and tensor.layout is torch.strided
        return change(tensor.detach()).requires_grad_(tensor.requires_grad) if suits else tensor

    mapped: Arguments = map_tensors(changed, arguments)
    return mapped


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, the last two dimensions the other way round in memory."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat_interleave(2)[::2]


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second matrix or row of twice as many."""
    return tensor.repeat_interleave(2, 0)[::2] if tensor.dim() > 1 else tensor


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    """The same values behind others in one memory, unaligned."""
    padded = tensor.new_full((tensor.numel() + 3,), 7.0)
    padded[3:] = tensor.reshape(-1)
    return padded[3:].view(tensor.shape)


def _spaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in rows with a gap behind each."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 5), 7.0) if tensor.dim() else tensor.clone()
    if tensor.dim():
        wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]] if tensor.dim() else wide


def _scaled(exponent: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Values times a power of two: the largest is that share of the largest number, in its exponent."""

    def scale(tensor: torch.Tensor) -> torch.Tensor:
        info = torch.finfo(tensor.dtype)
        end = torch.tensor(info.max).double().log2() if exponent > 0 else -torch.tensor(info.tiny).double().log2()
        largest = tensor.abs().amax().double().clamp_min(info.tiny)
        factor = torch.exp2((float(end) * exponent - largest.log2()).floor())
        return (tensor.double() * factor).to(tensor.dtype)

    return scale


def _ramp(tensor: torch.Tensor) -> torch.Tensor:
    """Values none of which is like another: places that are mixed up show."""
    return (
        (torch.arange(1, tensor.numel() + 1, dtype=torch.float64) / tensor.numel()).view(tensor.shape).to(tensor.dtype)
    )


def _cancelling(tensor: torch.Tensor) -> torch.Tensor:
    """Values of alternating sign and nearly equal magnitude, whose sums cancel."""
    flat = 1 + tensor.double().reshape(-1) / (_STEEP * tensor.double().abs().amax().clamp_min(1e-30))
    flat[1::2] *= -1
    return flat.view(tensor.shape).to(tensor.dtype)


def _steep(tensor: torch.Tensor) -> torch.Tensor:
    """Values on an offset that is large beside what varies."""
    return (tensor.double() + _STEEP * tensor.double().abs().amax()).to(tensor.dtype)


_LAYOUTS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("transposed in memory", _transposed),
    ("with an offset in memory", _offset),
    ("in rows with gaps", _spaced),
    ("every second of a batch", _every_second),
)

_VALUES: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("all zero", torch.zeros_like),
    ("a ramp", _ramp),
    ("half of the range", _scaled(0.45)),
    ("near the end of the range", _scaled(0.95)),
    ("small", _scaled(-0.45)),
    ("subnormal", _scaled(-1.02)),
    ("cancelling sums", _cancelling),
    ("on a large offset", _steep),
)
