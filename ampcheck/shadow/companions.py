"""The companions of tensors: float64 values carried along with every floating storage of the run.

Companions belong to storages, so views, in-place ops, `.data`, tensors saved for backward and parameter updates need no
rule: the companion of a view is the same view of the companion of its storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import TypeAlias

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where

MOVE = 2.0**-11
"""How far entering data is moved, relative to their size: the unit roundoff of float16. Results scale it linearly."""

_SIGNS = (1 << 18) + 3
"""Elements of the pattern of random signs. It is applied from a random position on, and repeated."""

_SAMPLED = 1 << 16
"""Elements from which a sample decides whether entering data holds whole numbers."""

Key: TypeAlias = Hashable
"""Of a fault, see `ampcheck.shadow.faults`."""

_ROUNDOFF: dict[torch.dtype, float] = {}

_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
"""The dtype of the two parts of a complex element."""


class Flat:
    """The values of one side (exact or moved) of a storage, which several companions share until one writes."""

    __slots__ = ("owners", "values")

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.owners = 1


class Companions:
    """The companions of one storage, flat, in units of its elements; a complex element counts as two.

    exact: float64. moved: float32. dtype: the format in which the run reads the memory. unit: the unit roundoff of the
    coarsest format in the history of the values. whole: every element is a whole number that came from integers.
    faults: keys of the faults that the values suffer from; trail: how they got there. updates: writes in a row that
    build on the previous value; site: the op that writes an accumulator which is no single tensor (`total = total +
    x`). used: an op has read the values; consumed: one with floating results. written: an op of this run wrote the
    values; else they entered as data. depth: roundings to 16 bits on the longest way from data. suspects: by sort, keys
    of places where something happened that does no harm by itself, see `ampcheck.shadow.suspects`. bytes: the real
    values at the last look, of memory that NumPy may write. alive: the storage; None for companions of one use, of
    memory that is read in another format.
    """

    __slots__ = (
        "alive", "bytes", "consumed", "depth", "dtype", "exact", "faults", "moved", "site", "start", "suspects",
        "trail", "unit", "updates", "used", "whole", "written",
    )  # fmt: skip

    def __init__(
        self, exact: Flat, moved: Flat, dtype: torch.dtype, unit: float, *, whole: bool = False, written: bool = False
    ) -> None:
        self.exact, self.moved, self.dtype = exact, moved, dtype
        self.unit, self.whole, self.written = unit, whole, written
        self.faults: frozenset[Key] = frozenset()
        self.trail: object = None
        self.updates = 0
        self.site: Where | None = None
        self.start: object = None
        self.consumed = self.used = False
        self.depth = 0
        self.suspects: dict[str, Key] = {}
        self.alive: weakref.ref[torch.UntypedStorage] | None = None
        self.bytes: torch.Tensor | None = None

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
    """The companions of every floating storage that was seen and is alive. watches: some memory is watched."""

    def __init__(self, seed: int = 0) -> None:
        self.on_forget: Callable[[Companions], None] | None = None
        self._by_storage: dict[int, Companions] = {}
        self.watches = False
        self._seed = seed
        self._entered = 0

    def __len__(self) -> int:
        return len(self._by_storage)

    def __iter__(self) -> Iterator[Companions]:
        return iter(list(self._by_storage.values()))

    def known(self, tensor: torch.Tensor) -> Companions | None:
        """The companions of a tensor's storage; None where no op has seen it.

        They follow a storage that was resized or that NumPy wrote. A tensor that reads the memory in another format
        gets companions of its own, which are not kept.
        """
        storage = tensor.untyped_storage()
        companions = self._by_storage.get(storage._cdata)
        if companions is None:
            return None
        dtype = companions.dtype
        if storage.nbytes() != companions.exact.values.numel() * dtype.itemsize:
            _resize(companions, storage)
        if companions.bytes is not None:
            _reread(companions, storage)
        if dtype is not tensor.dtype and dtype is not _PARTS.get(tensor.dtype):
            return self._lifted(tensor, storage, moves=False)
        return companions

    def of(self, tensor: torch.Tensor, *, moves: bool = True) -> Companions:
        """The companions of a tensor's storage; a storage that is new enters with its present values.

        moves: the values are data, whose conditioning is measured, and no result of the run.
        """
        companions = self.known(tensor)
        if companions is not None:
            return companions
        storage = tensor.untyped_storage()
        with torch.inference_mode(False):  # else what enters inside it could not be written outside
            return self._keep(storage, self._lifted(tensor, storage, moves))

    def to_write(self, tensor: torch.Tensor) -> Companions:
        """The companions of a tensor that an op has written, with values of their own."""
        companions = self.of(tensor)
        companions.own()
        storage = tensor.untyped_storage()
        if companions.alive is None and tensor.numel() * tensor.element_size() == storage.nbytes():
            self._keep(storage, companions)  # the whole memory is of another format from now on
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
        dtype = _part(tensor.dtype)
        size = storage.nbytes() // dtype.itemsize
        companions = self._by_storage.get(storage._cdata)
        if companions is not None and companions.dtype is dtype and companions.exact.values.numel() == size:
            companions.own()  # the second result in one storage
            view_of(tensor, companions.exact.values).copy_(exact)
            view_of(tensor, companions.moved.values).copy_(moved)
            companions.unit = max(companions.unit, unit)
            return companions
        sides = [
            _adopted(tensor, result, size, side) for result, side in ((exact, torch.float64), (moved, torch.float32))
        ]
        return self._keep(storage, Companions(Flat(sides[0]), Flat(sides[1]), dtype, unit, written=True))

    def write(self, tensor: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor) -> None:
        """Write two results into the companions of a tensor that an op has written; results that are in them stay."""
        companions = self.of(tensor)
        for flat, result in ((companions.exact.values, exact), (companions.moved.values, moved)):
            if result.untyped_storage()._cdata != flat.untyped_storage()._cdata:
                view_of(tensor, flat).copy_(result)

    def share(self, tensor: torch.Tensor, source: torch.Tensor) -> Companions | None:
        """Make the companions of `source` those of `tensor` as well; None where their layouts in memory differ."""
        storage, dtype = tensor.untyped_storage(), _part(tensor.dtype)
        companions = self.of(source)
        if tensor.is_complex() != source.is_complex() or tensor.stride() != source.stride():
            return None
        if source.is_conj() or source.is_neg() or tensor.is_conj() or tensor.is_neg():
            return None
        size = storage.nbytes() // dtype.itemsize
        if not size == companions.exact.values.numel() == tensor.numel() * (2 if tensor.is_complex() else 1):
            return None
        if tensor.storage_offset() or source.storage_offset() or storage._cdata in self._by_storage:
            return None
        return self._shared(storage, companions, dtype)

    def copy_memory(self, tensor: torch.Tensor, source: torch.Tensor) -> bool:
        """Follow a copy of all bytes of one storage to another, as `copy.deepcopy` does; False where it is none."""
        storage, copied = tensor.untyped_storage(), source.untyped_storage()
        companions = self._by_storage.get(copied._cdata)
        sizes = {storage.nbytes(), copied.nbytes(), *(t.numel() * t.element_size() for t in (tensor, source))}
        if companions is None or len(sizes) > 1 or storage._cdata == copied._cdata:
            return False
        self._shared(storage, companions, companions.dtype)
        return True

    def reread(self, tensor: torch.Tensor) -> None:
        """Restart the companions of the memory of a tensor, which was written in another format."""
        storage = tensor.untyped_storage()
        companions = self._by_storage.get(storage._cdata)
        if companions is None or not tensor.numel():
            return
        companions.own()
        size, step = companions.dtype.itemsize, tensor.element_size()
        last = tensor.storage_offset() + sum(
            (n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True)
        )
        first, end = tensor.storage_offset() * step // size, -(-(last + 1) * step // size)
        values = _values(storage, companions.dtype, tensor.device)[first:end]
        for flat in (companions.exact, companions.moved):
            flat.values[first:end].copy_(values)

    def lift(self, tensor: torch.Tensor, *, moves: bool = False) -> None:
        """Replace the companions of a tensor by its present values."""
        companions = self.of(tensor)
        companions.own()
        exact = view_of(tensor, companions.exact.values)
        exact.copy_(tensor)
        moved = exact
        if moves and not tensor.is_complex():
            moved = self._shaken(exact.to(torch.float32).reshape(-1)).view(tensor.shape)
        view_of(tensor, companions.moved.values).copy_(moved)

    def watch_memory(self, tensor: torch.Tensor, companions: Companions) -> None:
        """Compare the real values with those of now before each use: something outside may write them."""
        if companions.alive is not None:
            companions.bytes = _values(tensor.untyped_storage(), companions.dtype, tensor.device).clone()
            self.watches = True

    def nbytes(self) -> int:
        """Bytes of all companions, shared values once."""
        flats = {id(flat): flat.values for c in self for flat in (c.exact, c.moved)}
        return sum(values.nbytes for values in flats.values())

    def _lifted(self, tensor: torch.Tensor, storage: torch.UntypedStorage, moves: bool) -> Companions:
        """Companions with the present values of a storage."""
        dtype = _part(tensor.dtype)
        values = _values(storage, dtype, tensor.device)
        exact = values.to(torch.float64, copy=True)
        unit = roundoff(dtype)
        if moves and values.numel() and dtype.itemsize < 8:
            moved = self._move(values.to(torch.float32))
        else:
            moved = values.to(torch.float32, copy=True)
        return Companions(Flat(exact), Flat(moved), dtype, unit, written=not moves)

    def _move(self, values: torch.Tensor) -> torch.Tensor:
        """Data moved by `MOVE`; what a format holds exactly, such as masks, counters and scales, has no error."""
        if values.numel() >= _SAMPLED:
            sample = values[:: values.numel() // 1024]
            if not bool((sample.round() == sample).any()):
                return self._shaken(values)
        integers = values.round() == values
        return torch.where(integers, values, self._shaken(values))

    def _shaken(self, values: torch.Tensor) -> torch.Tensor:
        """Values times 1 plus or minus `MOVE`, with random signs of our own generator."""
        self._entered += 1
        first, numel = (self._entered * 40503) % _SIGNS, values.numel()
        factors = _pattern(self._seed, values.device)[first : first + _SIGNS]
        if numel <= _SIGNS:
            return values * factors[:numel]
        shaken, whole = torch.empty_like(values), numel - numel % _SIGNS
        torch.mul(values[:whole].view(-1, _SIGNS), factors, out=shaken[:whole].view(-1, _SIGNS))
        torch.mul(values[whole:], factors[: numel - whole], out=shaken[whole:])
        return shaken

    def _shared(self, storage: torch.UntypedStorage, companions: Companions, dtype: torch.dtype) -> Companions:
        companions.exact.owners += 1
        companions.moved.owners += 1
        unit, whole = max(companions.unit, roundoff(dtype)), companions.whole
        return self._keep(
            storage, Companions(companions.exact, companions.moved, dtype, unit, whole=whole, written=True)
        )

    def _keep(self, storage: torch.UntypedStorage, companions: Companions) -> Companions:
        number = storage._cdata
        old = self._by_storage.get(number)
        if old is not None:
            old.release()

        def forget(_: object) -> None:
            if self._by_storage.get(number) is companions:
                del self._by_storage[number]
                companions.release()
                if self.on_forget is not None:
                    self.on_forget(companions)

        companions.alive = weakref.ref(storage, forget)
        self._by_storage[number] = companions
        return companions


@lru_cache(maxsize=8)
def _pattern(seed: int, device: torch.device) -> torch.Tensor:
    """Random factors 1 plus or minus `MOVE`, twice; drawing them takes longer than a small model runs."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (_SIGNS,), generator=generator, dtype=torch.float32).mul_(2).sub_(1)
    return signs.mul_(MOVE).add_(1).to(device).repeat(2)


def view_of(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The part of flat companions that belongs to a tensor, with its shape, strides and conjugation."""
    if tensor.is_complex():
        strides = [2 * stride for stride in tensor.stride()]
        pairs = flat.as_strided((*tensor.size(), 2), (*strides, 1), 2 * tensor.storage_offset())
        view = torch.view_as_complex(pairs)
        view = view.conj() if tensor.is_conj() else view
    else:
        view = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return torch._neg_view(view) if tensor.is_neg() else view


def has_companions(value: object) -> bool:
    """Whether a value is a floating tensor that can have companions: with memory, strided, on a device."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    if value.layout is not torch.strided or value.is_nested or value.is_meta or value._is_zerotensor():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False  # the tensor inside has
    return value.untyped_storage().nbytes() > 0 or value.numel() == 0


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff of a floating or complex dtype."""
    unit = _ROUNDOFF.get(dtype)
    if unit is None:
        unit = _ROUNDOFF[dtype] = format_of(_part(dtype)).unit_roundoff
    return unit


def _part(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the numbers in a storage: that of the parts of complex elements."""
    return _PARTS.get(dtype, dtype)


def _values(storage: torch.UntypedStorage, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All numbers in a storage."""
    flat = torch.empty(0, dtype=dtype, device=device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def _resize(companions: Companions, storage: torch.UntypedStorage) -> None:
    """Follow a storage that was resized: what remains keeps its companions, what is new starts with its values."""
    values = _values(storage, companions.dtype, companions.exact.values.device)
    companions.own()
    for flat in (companions.exact, companions.moved):
        kept = min(flat.values.numel(), values.numel())
        flat.values = torch.cat([flat.values[:kept], values[kept:].to(flat.values.dtype)])
    if companions.bytes is not None:
        companions.bytes = values.clone()


def _reread(companions: Companions, storage: torch.UntypedStorage) -> None:
    """Restart the values that something outside of the run has written."""
    values = _values(storage, companions.dtype, companions.exact.values.device)
    before = companions.bytes
    assert before is not None
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[companions.dtype.itemsize]
    changed = values.view(integer) != before.view(integer)
    if bool(changed.any()):
        companions.own()
        for flat in (companions.exact, companions.moved):
            flat.values = torch.where(changed, values.to(flat.values.dtype), flat.values)
        companions.bytes = values.clone()


def _adopted(tensor: torch.Tensor, result: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A result as flat companions of a tensor: its own memory where the layouts agree and nothing else uses it."""
    plain = not result.is_complex() and result.dtype == dtype and result.stride() == tensor.stride()
    if plain and result.shape == tensor.shape and result.numel() == size and not result.is_neg():
        memory = result.untyped_storage()
        alone = torch._C._storage_Use_Count(memory._cdata) <= 2 and result is not tensor
        if alone and memory.nbytes() == size * dtype.itemsize and not tensor.storage_offset():
            return result.as_strided((size,), (1,))
    flat = torch.zeros(size, dtype=dtype, device=tensor.device)
    view_of(tensor, flat).copy_(result)
    return flat
