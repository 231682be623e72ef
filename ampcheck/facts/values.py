"""The companions of tensors: float64 values carried along with every floating storage of the run.

Companions belong to storages, so views, in-place ops, `.data`, tensors saved for backward and parameter updates need no
rule: the companion of a view is the same view of the companion of its storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ampcheck.core.run import Where
from ampcheck.facts.history import Key, Part, Past, Step, Sum
from ampcheck.facts.memory import has_companions, roundoff, values_in, view_of, write_view
from ampcheck.facts.moves import Moves
from ampcheck.facts.rows import Rows, is_large
from ampcheck.facts.sides import Change, Entering, Resting, Values
from ampcheck.facts.store import StorageMap
from ampcheck.torchtools.modes import aside
from ampcheck.torchtools.private import storage_users

_MANY = 1 << 10
"""Elements from which values that rest are packed."""


class Companions:
    """The companions of one storage, flat, in units of its elements; a complex element counts as two.

    dtype: the format in which the run reads the memory. unit: the unit roundoff of the coarsest format in the history
    of the values. whole: every element is a whole number that came from integers. faults: keys of the faults that the
    values suffer from; trail: how they got there. updates: writes in a row that build on the previous value; sites: the
    ops that write an accumulator which is no single tensor (`total = total + x`); parts: both, of parts that are
    written by themselves. consumed: an op with floating results has read the values. written: an op of this run wrote
    the values; else they are data. unset: nothing wrote them yet. depth: roundings to 16 bits on the longest way from
    data. suspects: by sort, keys, see `ampcheck.shadow.suspects`. bytes: the real values at the last look, of memory
    NumPy may write. settled: a collective wrote the values. gradient: a backward pass made them, or they are multiples
    or averages of such. lineage: of what they are a sum. held: the values, None while `source` has what they are made
    of. alive: the storage; None for companions of one use, of memory read in another format.
    """

    __slots__ = (
        "alive", "bytes", "consumed", "depth", "dtype", "faults", "gradient", "held", "lineage", "numel", "parts",
        "settled", "sites", "source", "suspects", "trail", "unit", "unset", "updates", "whole", "written",
    )  # fmt: skip

    def __init__(
        self,
        source: Values | Entering | Rows,
        dtype: torch.dtype,
        unit: float,
        *,
        whole: bool = False,
        written: bool = False,
    ) -> None:
        self.held = source if isinstance(source, Values) else None
        self.source: Entering | Resting | Rows | None = None if isinstance(source, Values) else source
        self.dtype, self.numel = dtype, source.exact.numel() if isinstance(source, Values) else source.numel
        self.unit, self.whole, self.written = unit, whole, written
        self.faults: frozenset[Key] = frozenset()
        self.trail: Step | None = None
        self.updates = 0
        self.sites: frozenset[Where] = frozenset()
        self.parts: dict[Part, Past] = {}
        self.lineage: Sum | None = None
        self.consumed = self.settled = self.gradient = self.unset = False
        self.depth = 0
        self.suspects: dict[str, Key] = {}
        self.alive: weakref.ref[torch.UntypedStorage] | None = None
        self.bytes: torch.Tensor | None = None

    @property
    def rows(self) -> Rows | None:
        """The companions of a large matrix that is followed by rows."""
        return self.source if isinstance(self.source, Rows) else None

    @property
    def values(self) -> Values:
        """The companions of all elements."""
        if self.held is None:
            self.fill()
        assert self.held is not None
        return self.held

    def fill(self) -> None:
        """Compute the companions of all elements; those of data are its present values."""
        storage = self.alive() if self.alive is not None else None
        if self.source is not None and storage is not None:
            with aside():
                self.held = self.source.values(values_in(storage, self.dtype, storage.device))
            self.source = None

    def rest(self) -> None:
        """Take less memory until an op uses the values again; not those of a few elements, nor what others share."""
        if self.held is not None and self.held.owners == 1 and self.numel >= _MANY:
            self.source, self.held = Resting(self.held), None

    def known_values(self) -> torch.Tensor:
        """The exact companions, of a large matrix those of the rows that have any."""
        return self.values.exact if self.rows is None else self.rows.exact

    def inherit(self, other: Companions) -> None:
        """Take over what is known of another's values, and what happened to them."""
        for name in _HISTORY:
            setattr(self, name, getattr(other, name))

    def own(self) -> None:
        """Stop sharing values with other companions, before a write."""
        self.unset, values = False, self.values
        if values.owners > 1:
            values.owners -= 1
            self.held = Values(values.exact.clone(), values.moved.clone())

    def release(self) -> None:
        """Forget the values."""
        if self.held is not None:
            self.held.owners -= 1


_HISTORY = (
    "consumed", "depth", "faults", "sites", "suspects", "trail", "unit", "updates", "whole", "written",
)  # fmt: skip


class CompanionStore(StorageMap[Companions]):
    """The companions of every floating storage that was seen and is alive.

    watches: some memory is watched. by_rows: some matrices are followed by rows. on_forget: is called with companions
    that have faults when their storage is freed. change: gives data other exact values.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._ended = self._freed
        self.on_forget: Callable[[Companions], None] | None = None
        self.watches = False
        self.by_rows = False
        self.change: Change | None = None
        self.moves = Moves(seed)

    def known(self, tensor: torch.Tensor) -> Companions | None:
        """The companions of a tensor's storage; None where no op has seen it.

        They follow a storage that was resized or that NumPy wrote. A tensor that reads the memory in another format
        gets companions of its own, which are not kept.
        """
        storage = tensor.untyped_storage()
        entry = self.entries.get(storage._cdata)  # inlined: asked for each tensor of each op
        if entry is None:
            return None
        companions = entry[1]
        dtype = companions.dtype
        if storage.nbytes() != companions.numel * dtype.itemsize:
            _resize(companions, storage)
        if companions.bytes is not None:
            _reread(companions, storage)
        if dtype is not tensor.dtype and dtype is not tensor.dtype.to_real():
            dtype = tensor.dtype.to_real()
            values = Entering(0, None).values(values_in(storage, dtype, tensor.device))
            return Companions(values, dtype, roundoff(dtype), written=True)
        return companions

    def of(self, tensor: torch.Tensor, *, moves: bool = True) -> Companions:
        """The companions of a tensor's storage; a storage that is new enters with its present values.

        moves: the values are data, whose conditioning is measured, and no result of the run.
        """
        storage = tensor.untyped_storage()
        entry = self.entries.get(storage._cdata)
        if entry is not None:
            companions = entry[1]
            plain = companions.bytes is None and companions.dtype is tensor.dtype
            same = plain and storage.nbytes() == companions.numel * companions.dtype.itemsize
            return companions if same else self.known(tensor) or companions
        if is_large(tensor):
            with torch.inference_mode(False):  # else what enters inside it could not be written outside
                return self.enter_rows(tensor, moves=moves)
        dtype = tensor.dtype.to_real()
        numel = storage.nbytes() // dtype.itemsize
        move = self.moves.drawn() if moves and numel and dtype.itemsize < 8 else None
        data = Entering(numel, move, self.change if moves and numel else None)
        return self._keep(storage, Companions(data, dtype, roundoff(dtype), written=not moves))

    def enter_rows(self, tensor: torch.Tensor, *, moves: bool) -> Companions:
        """Follow a large matrix by rows: none of them has companions as yet."""
        self.by_rows = True
        rows = Rows((tensor.shape[0], tensor.shape[1]), tensor.device, self.moves.move if moves else None)
        companions = Companions(rows, tensor.dtype, roundoff(tensor.dtype), written=not moves)
        return self._keep(tensor.untyped_storage(), companions)

    def to_write(self, tensor: torch.Tensor) -> Companions:
        """The companions of a tensor that an op has written, with values of their own."""
        companions = self.of(tensor)
        companions.own()
        companions.settled = False
        storage = tensor.untyped_storage()
        if companions.alive is None and tensor.numel() * tensor.element_size() == storage.nbytes():
            self._keep(storage, companions)  # the whole memory is of another format from now on
        return companions

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the companions of a tensor's storage."""
        companions = self.pop(tensor)
        if companions is not None:
            companions.release()

    def _freed(self, number: int, _: object) -> None:
        """Forget a storage that was freed: release its values, and report its faults."""
        if (entry := self.entries.pop(number, None)) is not None:
            entry[1].release()
            if entry[1].faults and self.on_forget is not None:
                self.on_forget(entry[1])

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """The exact companion of a tensor: float64, same shape."""
        return view_of(tensor, self.of(tensor).values.exact)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The moved companion of a tensor: float32, same shape."""
        return view_of(tensor, self.of(tensor).values.moved)

    def assign(self, tensor: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor, unit: float) -> Companions:
        """Make two results the companions of a tensor that an op returned."""
        storage = tensor.untyped_storage()
        dtype = tensor.dtype.to_real()
        size = storage.nbytes() // dtype.itemsize
        companions = self.get(storage)
        if companions is not None and companions.dtype is dtype and companions.numel == size:
            companions.own()  # the second result in one storage
            write_view(tensor, companions.values.exact, exact)
            write_view(tensor, companions.values.moved, moved)
            companions.unit = max(companions.unit, unit)
            return companions
        sides = [
            _adopted(tensor, result, size, side) for result, side in ((exact, torch.float64), (moved, torch.float32))
        ]
        return self._keep(storage, Companions(Values(*sides), dtype, unit, written=True))

    def write(self, tensor: torch.Tensor, exact: torch.Tensor, moved: torch.Tensor) -> None:
        """Write two results into the companions of a tensor that an op has written; results that are in them stay."""
        values = self.of(tensor).values
        for flat, result in ((values.exact, exact), (values.moved, moved)):
            if result.untyped_storage()._cdata != flat.untyped_storage()._cdata:
                write_view(tensor, flat, result)

    def share(self, tensor: torch.Tensor, source: torch.Tensor) -> bool:
        """Make the companions of `source` those of `tensor` as well; False where their layouts in memory differ."""
        storage, dtype = tensor.untyped_storage(), tensor.dtype.to_real()
        companions = self.of(source)
        if tensor.is_complex() != source.is_complex() or tensor.stride() != source.stride():
            return False
        if source.is_conj() or source.is_neg() or tensor.is_conj() or tensor.is_neg():
            return False
        size = storage.nbytes() // dtype.itemsize
        if not size == companions.numel == tensor.numel() * (2 if tensor.is_complex() else 1):
            return False
        if tensor.storage_offset() or source.storage_offset() or storage._cdata in self.entries:
            return False
        self._shared(storage, companions, dtype)
        return True

    def copy_memory(self, tensor: torch.Tensor, source: torch.Tensor) -> bool:
        """Follow a copy of all bytes to another storage, as `copy.deepcopy` makes; False of any other."""
        storage, copied = tensor.untyped_storage(), source.untyped_storage()
        companions = self.get(copied)
        if companions is None or storage._cdata == copied._cdata:
            return False
        if len({storage.nbytes(), copied.nbytes(), *(t.numel() * t.element_size() for t in (tensor, source))}) == 1:
            self._shared(storage, companions, companions.dtype)
            return True
        return False

    def write_integers(self, tensor: torch.Tensor, source: Any) -> None:
        """Follow integers that were written to memory that may hold floating numbers as well. source: of a copy."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        same = isinstance(source, torch.Tensor) and (source.dtype, source.layout) == (tensor.dtype, tensor.layout)
        if not (same and self.copy_memory(tensor, source)):
            self.reread(tensor)

    def reread(self, tensor: torch.Tensor) -> None:
        """Restart the companions of the memory of a tensor, which was written in another format."""
        storage = tensor.untyped_storage()
        companions = self.get(storage)
        if companions is None or not tensor.numel():
            return
        companions.own()
        size, step = companions.dtype.itemsize, tensor.element_size()
        last = tensor.storage_offset() + sum(
            (n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True)
        )
        first, end = tensor.storage_offset() * step // size, -(-(last + 1) * step // size)
        values = values_in(storage, companions.dtype, tensor.device)[first:end]
        for flat in (companions.values.exact, companions.values.moved):
            flat[first:end].copy_(values)

    def lift(self, tensor: torch.Tensor, *, moves: bool = False) -> None:
        """Replace the companions of a tensor by its present values."""
        companions = self.of(tensor)
        if companions.rows is not None and is_large(tensor):
            history = companions
            self.enter_rows(tensor, moves=moves).inherit(history)
            return
        companions.own()
        values = companions.values
        write_view(tensor, values.exact, tensor)
        write_view(tensor, values.moved, view_of(tensor, values.exact))
        if moves and not tensor.is_complex():
            moved = self.moves.shake(self.moved(tensor).reshape(-1)).view(tensor.shape)
            write_view(tensor, values.moved, moved)

    def lift_known(self, tensors: Iterable[torch.Tensor]) -> None:
        """The same for those tensors that have companions: what they hold now was computed unseen."""
        for tensor in tensors:
            if has_companions(tensor) and self.known(tensor) is not None:
                self.lift(tensor)

    def watch_memory(self, tensor: torch.Tensor, companions: Companions) -> None:
        """Compare the real values with those of now before each use: something outside may write them."""
        if companions.alive is not None:
            companions.fill()
            companions.bytes = values_in(tensor.untyped_storage(), companions.dtype, tensor.device).clone()
            self.watches = True

    def rest(self) -> None:
        """A step ended: let what lives on take less memory."""
        for companions in self.values():
            companions.rest()

    def nbytes(self) -> int:
        """Bytes of all companions, shared values once."""
        return sum(source.nbytes for source in {c.held or c.source for c in self.values()} if source is not None)

    def _shared(self, storage: torch.UntypedStorage, companions: Companions, dtype: torch.dtype) -> None:
        values = companions.values
        values.owners += 1
        unit, whole = max(companions.unit, roundoff(dtype)), companions.whole
        self._keep(storage, Companions(values, dtype, unit, whole=whole, written=True))

    def _keep(self, storage: torch.UntypedStorage, companions: Companions) -> Companions:
        old = self.entries.get(storage._cdata)
        if old is not None:
            old[1].release()
        companions.alive = self.put(storage, companions)
        return companions


def _resize(companions: Companions, storage: torch.UntypedStorage) -> None:
    """Follow a storage that was resized: what remains keeps its companions, what is new starts with its values."""
    values = values_in(storage, companions.dtype, companions.values.exact.device)
    companions.own()
    own, kept = companions.values, min(companions.numel, values.numel())
    own.exact, own.moved = (torch.cat([t[:kept], values[kept:].to(t.dtype)]) for t in (own.exact, own.moved))
    companions.numel = values.numel()
    if companions.bytes is not None:
        companions.bytes = values.clone()


def _reread(companions: Companions, storage: torch.UntypedStorage) -> None:
    """Restart the values that something outside of the run has written."""
    values = values_in(storage, companions.dtype, companions.values.exact.device)
    before = companions.bytes
    assert before is not None
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[companions.dtype.itemsize]
    changed = values.view(integer) != before.view(integer)
    if bool(changed.any()):
        companions.own()
        own = companions.values
        own.exact, own.moved = (torch.where(changed, values.to(t.dtype), t) for t in (own.exact, own.moved))
        companions.bytes = values.clone()


def _adopted(tensor: torch.Tensor, result: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A result as flat companions of a tensor: its own memory where the layouts agree and nothing else uses it."""
    plain = not result.is_complex() and result.dtype == dtype and result.stride() == tensor.stride()
    if plain and result.shape == tensor.shape and result.numel() == size and not result.is_neg():
        memory = result.untyped_storage()
        alone = storage_users(memory._cdata) <= 2 and result is not tensor
        if alone and memory.nbytes() == size * dtype.itemsize and not tensor.storage_offset():
            return result.as_strided((size,), (1,))
    flat = torch.zeros(size, dtype=dtype, device=tensor.device)
    write_view(tensor, flat, result)
    return flat
