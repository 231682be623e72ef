"""What optimizer steps change: by how much, and in narrow parameters how many elements keep their value."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ampcheck.torchtools.storage import local
from ampcheck.training.monitor.optimizers import expected_moves
from ampcheck.training.monitor.stats import UpdateSum
from ampcheck.training.monitor.sums import UpdateSums

CHUNK = 64 * 2**20
"""Bytes that are compared at once."""

_WIDE = 4
"""Bytes of an element of the differences."""


@dataclass(slots=True)
class Entry:
    """A parameter in a measured step. before: a copy of it, which is overwritten.

    alive: whether the step is to change it; a tensor if only the device knows. group: its optimizer's settings, state:
    its optimizer state; both None where the rounding is known.
    """

    key: int
    parameter: torch.Tensor
    before: torch.Tensor | None
    gradient: torch.Tensor | None
    alive: torch.Tensor | bool
    group: Mapping[str, Any] | None = None
    state: Mapping[Any, Any] | None = None


_Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


class Updates:
    """Sums of what steps change. peak: the most bytes of copies at once. unseen: counts what cannot be measured."""

    def __init__(self, unseen: Counter[str]) -> None:
        self.peak = 0
        self._unseen = unseen
        self._sums: dict[torch.device, UpdateSums] = {}
        self._first: dict[int, torch.Tensor] = {}
        self._moved: dict[int, torch.Tensor] = {}

    def add(self, entries: Sequence[Entry]) -> None:
        """The updates of one step, after it."""
        devices: dict[torch.device, list[tuple[Entry, torch.Tensor, torch.Tensor]]] = defaultdict(list)
        copies = sum(first.nbytes + self._moved[key].nbytes for key, first in self._first.items())
        copies += sum(entry.before.nbytes for entry in entries if entry.before is not None)
        for entry in entries:
            before = entry.before
            if before is None or entry.gradient is None:
                continue
            after = local(entry.parameter)
            if (after.shape, after.dtype, after.device) == (before.shape, before.dtype, before.device):
                devices[after.device].append((entry, before, after))
            else:
                self._unseen["updates that gave a parameter another shape, dtype or device"] += 1
        self.peak = max(self.peak, copies)
        for device, changed in devices.items():
            counts = {}
            for entry, before, after in changed:
                if after.dtype.is_floating_point and after.dtype.itemsize < _WIDE:
                    fresh = entry.key not in self._first
                    counts[entry.key] = self._unchanged(entry, before, after)
                    if fresh and entry.key in self._first:
                        copies += self._moved[entry.key].nbytes
            changes, weights, scratch = _norms([(before, after) for _, before, after in changed])
            self.peak = max(self.peak, copies + scratch)
            if device not in self._sums:
                self._sums[device] = UpdateSums(device)
            self._sums[device].add([entry.key for entry, _, _ in changed], changes, weights, counts)

    def still(self, parameters: Mapping[int, torch.Tensor]) -> dict[int, float]:
        """The share of the updated elements that are what they were at the first measured step. Waits for them."""
        shares = {}
        for key, first in self._first.items():
            now = local(parameters[key])
            if now.shape == first.shape:
                pieces = _pieces(self._moved[key], first, now)
                due, still = torch.stack([_counts(*piece) for piece in pieces]).sum(0).tolist()
                if due:
                    shares[key] = still / due
        return shares

    def read(self) -> dict[int, UpdateSum]:
        """The sums by key. Waits for the device."""
        return {key: update for sums in self._sums.values() for key, update in sums.read().items()}

    def forget(self) -> None:
        """Drop all copies."""
        self._first.clear()
        self._moved.clear()

    def _unchanged(self, entry: Entry, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """[4]: elements with a nonzero gradient, how many of them kept their value, and `expected_moves`."""
        assert entry.gradient is not None
        gradient = local(entry.gradient)
        if gradient.layout is not torch.strided:
            self._unseen["updates by sparse gradients, as to whether they changed anything"] += 1
            return torch.zeros(4, dtype=torch.float64, device=after.device)
        if entry.key not in self._first:
            self._first[entry.key] = before
            self._moved[entry.key] = torch.zeros_like(before, dtype=torch.bool)
        sums = []
        for moved, slope, old, new in _pieces(self._moved[entry.key], gradient, before, after):
            due = slope != 0
            due &= entry.alive
            moved |= due
            sums.append(_counts(due, old, new))
        counted = torch.stack(sums).sum(0).double()
        if entry.group is None or entry.state is None:
            return torch.cat((counted, counted.new_zeros(2)))
        return torch.cat((counted, expected_moves(before, after, gradient, entry.group, entry.state) * entry.alive))


def _counts(due: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[2]: how many are due, and how many of them kept their value. A sum would take eight bytes for each element."""
    same = old == new
    same &= due
    return torch.stack((due.count_nonzero(), same.count_nonzero()))


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape, split along their longest side so that a few float32 copies of a piece fit into `CHUNK`."""
    shape = tensors[0].shape
    if not shape or tensors[0].numel() * _WIDE * 2 <= CHUNK:
        yield tensors
        return
    side = max(range(len(shape)), key=lambda dim: shape[dim])
    rows = max(1, CHUNK * shape[side] // (tensors[0].numel() * _WIDE * 2))
    yield from zip(*(torch.split(tensor, rows, side) for tensor in tensors), strict=True)


def _norms(pairs: Sequence[_Pair]) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """The norms of the changes, of the weights, and the bytes it took. Wide copies of `before` are overwritten.

    Underscored functions, but in PyTorch's reference: one call for many parameters, as its own optimizers do.
    """
    norms: dict[int, list[_Pair]] = defaultdict(list)
    wide = [(number, pair) for number, pair in enumerate(pairs) if pair[1].dtype.itemsize >= _WIDE]
    narrow = [(number, pair) for number, pair in enumerate(pairs) if pair[1].dtype.itemsize < _WIDE]
    if wide:
        _add_norms(norms, wide, [pair for _, pair in wide])
    batches = list(_batches(narrow))
    # One memory for all: an allocator that allocates and frees pieces in turn may retain many of them.
    size = max((sum(2 * new.numel() for _, (_, new) in batch) for batch in batches), default=0)
    scratch = torch.empty(size, dtype=torch.float32, device=pairs[0][1].device)
    for batch in batches:
        used, copies = 0, []
        for _, pair in batch:
            for tensor in pair:
                copies.append(scratch[used : used + tensor.numel()].view(tensor.shape).copy_(tensor))
                used += tensor.numel()
        _add_norms(norms, batch, list(zip(copies[::2], copies[1::2], strict=True)))
    parts = [norms[number] for number in range(len(pairs))]
    whole = [part[0] if len(part) == 1 else torch.stack([torch.stack(p) for p in part]).norm(dim=0) for part in parts]
    return [norm[0] for norm in whole], [norm[1] for norm in whole], scratch.nbytes


def _add_norms(norms: dict[int, list[_Pair]], batch: Sequence[tuple[int, _Pair]], pairs: Sequence[_Pair]) -> None:
    """Add the norms of the changes and of the weights; `before` is overwritten with the change."""
    was, now = [before for before, _ in pairs], [after for _, after in pairs]
    torch._foreach_sub_(was, now)
    for (number, _), change, weight in zip(batch, torch._foreach_norm(was), torch._foreach_norm(now), strict=True):
        norms[number].append((change, weight))


def _batches(pairs: Sequence[tuple[int, _Pair]]) -> Iterator[list[tuple[int, _Pair]]]:
    """Pieces of (before, after), by their number, as many at a time as fit into `CHUNK`."""
    batch: list[tuple[int, _Pair]] = []
    size = 0
    for number, pair in pairs:
        for old, new in _pieces(*pair):
            more = 2 * _WIDE * new.numel()
            if batch and size + more > CHUNK:
                yield batch
                batch, size = [], 0
            batch.append((number, (old, new)))
            size += more
    if batch:
        yield batch
