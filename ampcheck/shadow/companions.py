"""The companions of tensors: float64 values carried along with every floating storage of the run.

Companions belong to storages, so views, in-place ops, `.data`, tensors saved for backward and parameter updates need no
rule: the companion of a view is the same view of the companion of its storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where

MOVE = 2.0**-11
"""How far entering data is moved, relative to their size: the unit roundoff of float16. Results scale it linearly."""

_SIGNS = (1 << 18) + 3
"""Elements of the pattern of random signs. It is applied from a random position on, and repeated."""

Key: TypeAlias = Hashable
"""Of a fault, see `ampcheck.shadow.faults`."""

_ROUNDOFF: dict[torch.dtype, float] = {}


class Flat:
    """The values of one side (exact or moved) of a storage, which several companions share until one writes."""

    __slots__ = ("owners", "values")

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.owners = 1


class Companions:
    """The companions of one storage, flat, in units of its elements; a complex element counts as two.

    exact: float64. moved: float32. unit: the unit roundoff of the coarsest format in the history of the values.
    whole: every element is a whole number that came from integers. faults: keys of the faults that the values suffer
    from; trail: how they got there. updates: writes in a row that build on the previous value; site: the op that
    writes an accumulator which is no single tensor (`total = total + x`). used: an op has read the values; consumed:
    one with floating results. written: an op of this run wrote the values; else they entered as data. depth: roundings
    to 16 bits on the longest way from data. vanished, masked: keys of the places where elements became zero, or
    negative infinities of a mask, which do no harm by themselves.
    """

    __slots__ = (
        "alive", "consumed", "depth", "exact", "faults", "masked", "moved", "site", "start", "trail", "unit",
        "updates", "used", "vanished", "whole", "written",
    )  # fmt: skip

    def __init__(self, exact: Flat, moved: Flat, unit: float, *, whole: bool = False, written: bool = False) -> None:
        self.exact, self.moved = exact, moved
        self.unit, self.whole, self.written = unit, whole, written
        self.faults: frozenset[Key] = frozenset()
        self.trail: object = None
        self.updates = 0
        self.site: Where | None = None
        self.start: object = None
        self.consumed = self.used = False
        self.depth = 0
        self.vanished: Key | None = None
        self.masked: Key | None = None
        self.alive: weakref.ref[torch.UntypedStorage] | None = None

    def own(self) -> None:
        """Stop sharing values with other companions, before a write."""
        for name in ("exact", "moved"):
            flat: Flat = getattr(self, name)
            if flat.owners > 1:
                flat.owners -= 1
                setattr(self, name, Flat(flat.values.clone()))

    def release(self) -> None:
        """Forget the values."""
        self.exact.owners -= 1
        self.moved.owners -= 1


class CompanionStore:
    """The companions of every floating storage that was seen and is alive."""

    def __init__(self, seed: int = 0) -> None:
        self._by_storage: dict[int, Companions] = {}
        self._seed = seed
        self._entered = 0

    def __len__(self) -> int:
        return len(self._by_storage)

    def __iter__(self) -> Iterator[Companions]:
        return iter(list(self._by_storage.values()))

    def known(self, tensor: torch.Tensor) -> Companions | None:
        """The companions of a tensor's storage; None where no op has seen it."""
        storage = tensor.untyped_storage()
        companions = self._by_storage.get(storage._cdata)
        if companions is None or companions.exact.values.numel() == _elements(tensor, storage):
            return companions
        del self._by_storage[storage._cdata]  # the storage was resized, or is read in a format of another size
        return None

    def of(self, tensor: torch.Tensor, *, moves: bool = True) -> Companions:
        """The companions of a tensor's storage; a storage that is new enters with its present values.

        moves: the values are data, whose conditioning is measured, and no result of the run.
        """
        companions = self.known(tensor)
        if companions is None:
            with torch.inference_mode(False):  # else what enters inside it could not be written outside
                companions = self._enter(tensor, moves)
        return companions

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the companions of a tensor's storage."""
        companions = self._by_storage.pop(tensor.untyped_storage()._cdata, None)
        if companions is not None:
            companions.release()

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """The exact companion of a tensor: float64, same shape."""
        return view_of(tensor, self.of(tensor).exact.values)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The moved companion of a tensor: float32, same shape."""
        return view_of(tensor, self.of(tensor).moved.values)

    def assign(self, tensor: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor, unit: float) -> Companions:
        """Make two results the companions of a tensor that an op returned."""
        storage = tensor.untyped_storage()
        size = _elements(tensor, storage)
        companions = self._by_storage.get(storage._cdata)
        if companions is not None and companions.exact.values.numel() == size:  # the second result in one storage
            companions.own()
            view_of(tensor, companions.exact.values).copy_(exact)
            view_of(tensor, companions.moved.values).copy_(moved)
            companions.unit = max(companions.unit, unit)
            return companions
        sides = [
            _adopted(tensor, result, size, dtype) for result, dtype in ((exact, torch.float64), (moved, torch.float32))
        ]
        return self._keep(storage, Companions(Flat(sides[0]), Flat(sides[1]), unit, written=True))

    def share(self, tensor: torch.Tensor, source: torch.Tensor) -> Companions | None:
        """Make the companions of `source` those of `tensor` as well; None where their layouts in memory differ."""
        storage = tensor.untyped_storage()
        companions = self.of(source)
        if tensor.is_complex() != source.is_complex() or tensor.stride() != source.stride():
            return None
        if source.is_conj() or source.is_neg() or tensor.is_conj() or tensor.is_neg():
            return None
        if (
            not _elements(tensor, storage)
            == companions.exact.values.numel()
            == tensor.numel() * (2 if tensor.is_complex() else 1)
        ):
            return None
        if tensor.storage_offset() or source.storage_offset() or storage._cdata in self._by_storage:
            return None
        companions.exact.owners += 1
        companions.moved.owners += 1
        unit = max(companions.unit, roundoff(tensor.dtype))
        shared = Companions(companions.exact, companions.moved, unit, whole=companions.whole, written=True)
        return self._keep(storage, shared)

    def lift(self, tensor: torch.Tensor, *, moves: bool = False) -> None:
        """Replace the companions of a tensor by its present values."""
        companions = self.of(tensor)
        companions.own()
        exact = view_of(tensor, companions.exact.values)
        exact.copy_(tensor)
        view_of(tensor, companions.moved.values).copy_(exact)
        if moves and not tensor.is_complex() and tensor.numel():
            view_of(tensor, companions.moved.values).mul_(
                self._factors(tensor.numel(), tensor.device).view(tensor.shape)
            )

    def nbytes(self) -> int:
        """Bytes of all companions, shared values once."""
        flats = {id(flat): flat.values for c in self for flat in (c.exact, c.moved)}
        return sum(values.nbytes for values in flats.values())

    def _enter(self, tensor: torch.Tensor, moves: bool) -> Companions:
        storage = tensor.untyped_storage()
        step = 2 if tensor.is_complex() else 1
        numel = _elements(tensor, storage) // step
        values = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        values.set_(storage, 0, (numel,), (1,))
        if step == 2:
            values = torch.view_as_real(values).reshape(-1)
        exact = values.to(torch.float64, copy=True)
        moved = values.to(torch.float32, copy=True)
        unit, whole = roundoff(tensor.dtype), False
        if moves and numel and tensor.dtype.itemsize < 16:
            # What a format holds exactly, such as masks, counters and scales, enters without an error.
            integers = moved.round() == moved
            torch.where(integers, moved, moved * self._factors(moved.numel(), moved.device), out=moved)
            whole = bool(integers[:1]) and bool(integers.all())
        return self._keep(storage, Companions(Flat(exact), Flat(moved), unit, whole=whole, written=not moves))

    def _factors(self, numel: int, device: torch.device) -> torch.Tensor:
        """1 plus or minus `MOVE`, with random signs of our own generator."""
        pattern = _pattern(self._seed, device)
        self._entered += 1
        first = (self._entered * 40503) % _SIGNS
        if first + numel <= _SIGNS:
            return pattern[first : first + numel]
        return pattern.roll(-first).repeat(-(-numel // _SIGNS))[:numel]

    def _keep(self, storage: torch.UntypedStorage, companions: Companions) -> Companions:
        number = storage._cdata
        old = self._by_storage.get(number)
        if old is not None:
            old.release()

        def forget(_: object) -> None:
            if self._by_storage.get(number) is companions:
                del self._by_storage[number]
                companions.release()

        companions.alive = weakref.ref(storage, forget)
        self._by_storage[number] = companions
        return companions


@lru_cache(maxsize=8)
def _pattern(seed: int, device: torch.device) -> torch.Tensor:
    """Random factors 1 plus or minus `MOVE`; drawing them takes longer than a small model runs."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (_SIGNS,), generator=generator, dtype=torch.float32).mul_(2).sub_(1)
    return signs.mul_(MOVE).add_(1).to(device)


def view_of(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The part of flat companions that belongs to a tensor, with its shape, strides and conjugation."""
    if tensor.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
        view = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        view = view.conj() if tensor.is_conj() else view
    else:
        view = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return torch._neg_view(view) if tensor.is_neg() else view


def has_companions(value: object) -> bool:
    """Whether a value is a floating tensor that can have companions: with memory, strided, on a device."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        return False
    return value.untyped_storage().nbytes() > 0 or value.numel() == 0


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff of a floating or complex dtype."""
    unit = _ROUNDOFF.get(dtype)
    if unit is None:
        real = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
        unit = _ROUNDOFF[dtype] = format_of(real.get(dtype, dtype)).unit_roundoff
    return unit


def nonoverlapping(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements of a layout share memory."""
    extent = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride < extent:
                return False
            extent = stride * (size - 1) + extent
    return True


def _elements(tensor: torch.Tensor, storage: torch.UntypedStorage) -> int:
    """Elements of a storage in the dtype of a tensor on it, complex ones twice."""
    if tensor.is_complex():
        return storage.nbytes() // (tensor.element_size() // 2)
    return storage.nbytes() // tensor.element_size()


def _adopted(tensor: torch.Tensor, result: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A result as flat companions of a tensor: its own memory where the layouts agree, else a copy."""
    plain = not result.is_complex() and result.dtype == dtype and result.stride() == tensor.stride()
    if plain and result.shape == tensor.shape and result.numel() == size and not result.is_neg():
        memory = result.untyped_storage().nbytes() == size * dtype.itemsize
        if memory and not result.storage_offset() and not tensor.storage_offset():
            return result.as_strided((size,), (1,))
    flat = torch.zeros(size, dtype=dtype, device=tensor.device)
    view_of(tensor, flat).copy_(result)
    return flat
