"""Float32 products of operands whose last mantissa bits were cut off before."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampcheck.core.errors import as_result, brief, require_ran
from ampcheck.core.run import Where
from ampcheck.facts.store import StorageMap
from ampcheck.records.tf32 import OperandStats, ReducedProduct
from ampcheck.stream.ops import OpEvent, OpSubscriber
from ampcheck.torchtools.private import CAST
from ampcheck.torchtools.pytree import map_tensors
from ampcheck.training.tf32.settings import relative_error

_LOST_BITS = 13
"""TF32 keeps 10 of the 23 bits of a float32 mantissa: operands that lost fewer bits are more precise."""

_MEASURED = 32
"""Products that are computed again in float64; further ones are only counted."""

_KEEPING = {"aten::clone", "aten::where.self", "aten::nan_to_num", "aten::copy_", "aten::detach", "aten::alias"}
"""Ops on floats whose result may still be the rounded values, as their bits show where they are multiplied."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """The float32 values that a memory was made from.

    values: flat, one for each `itemsize` bytes, so that a view of the memory has the same view of them. family: shared
    by all that were made from one tensor; whether a rounded part was subtracted from the whole: then the rest is
    multiplied on its own, and nothing is lost.
    """

    values: torch.Tensor
    family: list[bool]
    itemsize: int = 4

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that belong to a tensor in this memory."""
        return self.values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class OperandWatch(OpSubscriber):
    """Follows float32 tensors through views of their bits into products.

    Only integer views are followed: values that were in a 16-bit dtype have it as their dtype. Ops inside compiled code
    are not seen.
    """

    compiles = True

    def __init__(self) -> None:
        self._origins = StorageMap[_Origin]()
        self._products = 0
        self._measured = 0
        self._reduced: list[tuple[ReducedProduct, list[bool]]] = []

    def stats(self, subject: str, raised: str) -> OperandStats:
        """The products so far, each line of the source once, with its largest error."""
        lines: defaultdict[object, list[ReducedProduct]] = defaultdict(list)
        for product, split in self._reduced:
            if not split[0]:
                lines[product.where].append(product)

        def error(product: ReducedProduct) -> float:
            return -1.0 if product.error is None else product.error

        reduced = tuple(replace(max(same, key=error), calls=len(same)) for same in lines.values())
        return OperandStats(subject, self._products, reduced, raised)

    def see(self, event: OpEvent) -> Any:
        """Follow an op."""
        if event.higher:
            return event.run()
        args, op = event.args, event.traits
        whole = args[0] if op.title == "aten::view.dtype" and args[0].dtype is torch.float32 else None
        if whole is not None and whole.layout is torch.strided and self._origin(whole) is None:
            storage = whole.untyped_storage()
            flat = torch.empty(0, device=whole.device).set_(storage, 0, (storage.nbytes() // 4,), (1,))
            self._origins.put(whole, _Origin(flat.clone(), [False]))  # a copy: the bits may be changed in place
        out = event.run()
        if op.contracts and op.factors:
            self._multiply(event)
        elif len(self._origins) and isinstance(out, torch.Tensor):
            self._follow(event)
        return out

    def _origin(self, tensor: object) -> _Origin | None:
        origin = self._origins.get(tensor)
        fits = origin is not None and isinstance(tensor, torch.Tensor) and tensor.element_size() == origin.itemsize
        return origin if fits else None

    def _follow(self, event: OpEvent) -> None:
        name, out = event.traits.title, event.out
        inputs = [(tensor, origin) for tensor in event.tensors if (origin := self._origin(tensor)) is not None]
        if not inputs or out.layout is not torch.strided or self._origin(out) is inputs[0][1]:
            return
        source, origin = inputs[0]
        values = origin.of(source)
        if name == "aten::sub.Tensor" and len(inputs) > 1:
            origin.family[0] |= inputs[1][1] is not origin and inputs[1][1].family is origin.family
            return
        if name == "aten::constant_pad_nd":
            args = map_tensors(lambda tensor: values if tensor is source else tensor, event.args)
            values = event.op(*args, **event.kwargs)
        elif name == "aten::_to_copy" and out.dtype is source.dtype:
            values = values.to(out.device)
        elif out.shape != source.shape or not (name in _KEEPING or _is_on_bits(event.op, source, out)):
            return
        size = out.element_size()
        kept = _Origin(torch.zeros(out.untyped_storage().nbytes() // size, device=out.device), origin.family, size)
        kept.of(out).copy_(values)
        self._origins.put(out, kept)

    def _multiply(self, event: OpEvent) -> None:
        out = event.out
        if not isinstance(out, torch.Tensor) or out.dtype is not torch.float32:
            return
        self._products += 1
        pair = event.args[event.traits.factors[0] :][:2]
        origins = [
            (tensor, origin, _lost_bits(tensor, origin.of(tensor)))
            for tensor in pair
            if (origin := self._origin(tensor))
        ]
        reduced = [(tensor, origin, bits) for tensor, origin, bits in origins if bits >= _LOST_BITS]
        if not reduced:
            return
        error = None
        if self._measured < _MEASURED:
            self._measured += 1
            error = _error(event, {id(tensor): origin.of(tensor) for tensor, origin, _ in reduced})
        bits = min(bits for _, _, bits in reduced)
        where = Where("", "", event.traits.title, *event.line())
        self._reduced.append((ReducedProduct(where, bits, _terms(event, pair), error), reduced[0][1].family))


def _is_on_bits(func: Any, source: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether an op works on the bits of numbers as integers."""
    keeps = torch.Tag.pointwise in func.tags or func.overloadpacket is CAST
    return keeps and not (source.is_floating_point() or out.is_floating_point())


def _lost_bits(value: torch.Tensor, origin: torch.Tensor) -> int:
    """Return how many trailing mantissa bits a rounding cut off; 0 where it is none, or where the origin has no more
    itself.

    A rounding to m bits moves a normal number by less than 2^-m of itself: a larger distance has another cause.
    """
    if value.shape != origin.shape or value.dtype is not torch.float32 or not value.numel():
        return 0
    bits, before = (tensor.contiguous().view(torch.int32) & (2**23 - 1) for tensor in (value.detach(), origin))
    zeros = next((count - 1 for count in range(1, 24) if bool((bits & (2**count - 1)).any())), 23)
    if not _LOST_BITS <= zeros < 23:
        return 0
    if float(((before & (2**zeros - 1)) != 0).float().mean()) < 0.5:
        return 0
    room = origin.abs() * 2.0 ** (zeros - 22) + torch.finfo(torch.float32).tiny
    near = (value.detach() - origin).abs() <= room
    return zeros if bool((near | ~origin.isfinite()).all()) else 0


def _error(event: OpEvent, origins: dict[int, torch.Tensor]) -> float | None:
    def exact(tensor: torch.Tensor) -> torch.Tensor:
        origin = origins.get(id(tensor), tensor)
        return origin.detach().double() if origin.is_floating_point() else origin

    try:
        wide = event.op(*map_tensors(exact, event.args), **map_tensors(exact, event.kwargs))
        return relative_error(event.out, wide)
    except (RuntimeError, TypeError, NotImplementedError):  # a device without float64, or not enough memory
        return None


def _terms(event: OpEvent, pair: tuple[torch.Tensor, ...]) -> int:
    if event.traits.title != "aten::convolution":
        return int(pair[0].shape[-1])
    transposed = bool(event.argument("transposed"))
    return math.prod(pair[1].shape[2:]) * pair[1].shape[0 if transposed else 1]


def measure_operands(function: Callable[[], Any], subject: str = "subject") -> OperandStats:
    """Run a function, and find its float32 products of operands that lost bits.

    An exception of the function is recorded, not raised. It may run backward, too.
    """
    raised = ""
    watch = OperandWatch()
    with watch:
        try:
            require_ran(function(), subject)
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; it is recorded
            raised = brief(as_result(error))
    return watch.stats(subject, raised)
