"""What optimizer steps change: by how much, and in narrow parameters how many elements keep their value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.training.monitor.expected import expected_moves
from ampcheck.training.monitor.folded import UpdateFold, UpdateSum
from ampcheck.training.monitor.unwrapped import local

CHUNK = 64 * 2**20
"""Bytes that are compared at once."""

_WIDE = 4
"""Bytes of an element of what a difference is taken in."""


@dataclass(slots=True)
class Entry:
    """A parameter in the step that is looked at. before: a copy of it, which is used up.

    alive: whether the step is to change it; a tensor if only the device knows. group: its optimizer's settings, state:
    what the optimizer keeps of it; both None where how it rounds is known.
    """

    key: int
    parameter: torch.Tensor
    before: torch.Tensor | None
    gradient: torch.Tensor | None
    alive: Any
    group: Mapping[str, Any] | None = None
    state: Mapping[Any, Any] | None = None


_Found = tuple[Entry, torch.Tensor, torch.Tensor]
_Batch = list[tuple[int, torch.Tensor, torch.Tensor]]


class Updates:
    """Adds up what steps change. The most bytes that it held at once are `peak`. unseen: counts what it cannot see."""

    def __init__(self, unseen: Counter[str]) -> None:
        self.peak = 0
        self._unseen = unseen
        self._folds: dict[torch.device, UpdateFold] = {}
        self._first: dict[int, torch.Tensor] = {}
        self._moved: dict[int, torch.Tensor] = {}

    def add(self, entries: Sequence[Entry]) -> None:
        """The updates of one step, after it."""
        devices: dict[torch.device, list[_Found]] = {}
        held = sum(one.before.nbytes for one in entries if one.before is not None) + self._kept()
        for one in entries:
            if one.before is None or one.gradient is None:
                continue
            after = local(one.parameter).detach()
            if after.shape != one.before.shape or after.dtype != one.before.dtype or after.device != one.before.device:
                self._unseen["updates that gave a parameter another shape, dtype or device"] += 1
                continue
            devices.setdefault(after.device, []).append((one, one.before, after))
        self.peak = max(self.peak, held)
        for device, found in devices.items():
            narrow = [one for one in found if one[2].dtype.is_floating_point and one[2].dtype.itemsize < _WIDE]
            counts = {}
            for one, before, after in narrow:
                fresh = one.key not in self._first
                counts[one.key] = self._unchanged(one, before, after)
                if fresh and one.key in self._first:  # its copy goes over into what is kept
                    held += self._moved[one.key].nbytes
            norms, taken = _norms(found)
            self.peak = max(self.peak, held + taken)
            if device not in self._folds:
                self._folds[device] = UpdateFold(device)
            self._folds[device].add([one.key for one, _, _ in found], norms, counts)

    def still(self, parameters: Mapping[int, torch.Tensor]) -> dict[int, float]:
        """The share of the elements looked at that are what they were at the first measured step. Waits for them."""
        shares = {}
        for key, first in self._first.items():
            now = local(parameters[key]).detach()
            if now.shape != first.shape:
                continue
            with torch.no_grad():
                pieces = _pieces(self._moved[key], first, now)
                counted = [
                    torch.stack((due.count_nonzero(), (due & (old == new)).count_nonzero())) for due, old, new in pieces
                ]
                whole, still = torch.stack(counted).sum(0).tolist()
            if whole:
                shares[key] = still / whole
        return shares

    def read(self) -> dict[int, UpdateSum]:
        """What was added up, by key. Waits for the device."""
        return {key: one for fold in self._folds.values() for key, one in fold.read().items()}

    def forget(self) -> None:
        """Let go of all copies."""
        self._first.clear()
        self._moved.clear()

    def _kept(self) -> int:
        return sum(first.nbytes + self._moved[key].nbytes for key, first in self._first.items())

    def _unchanged(self, one: Entry, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """[4]: elements with a nonzero gradient, how many of them kept their value, and `expected_moves`."""
        gradient = local(one.gradient)
        if gradient is None or gradient.layout is not torch.strided:
            self._unseen["updates by sparse gradients, as to whether they changed anything"] += 1
            return torch.zeros(4, dtype=torch.float64, device=after.device)
        if one.key not in self._first:
            self._first[one.key] = before
            self._moved[one.key] = torch.zeros_like(before, dtype=torch.bool)
        sums = []
        for moved, slope, old, new in _pieces(self._moved[one.key], gradient, before, after):
            due = slope != 0
            due &= one.alive
            moved |= due
            sums.append(_counts(due, old, new))
        counted = torch.stack(sums).sum(0).double()
        if one.group is None or one.state is None:
            return torch.cat((counted, counted.new_zeros(2)))
        return torch.cat((counted, expected_moves(before, after, gradient, one.group, one.state) * one.alive))


def _counts(due: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[2]: how many are due, and how many of them kept their value. A sum would take eight bytes for each element."""
    same = old == new
    same &= due
    return torch.stack((due.count_nonzero(), same.count_nonzero()))


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape, cut along their longest side so that a few float32 copies of a piece fit into `CHUNK`."""
    shape = tensors[0].shape
    if not shape or tensors[0].numel() * _WIDE * 2 <= CHUNK:
        yield tensors
        return
    side = max(range(len(shape)), key=lambda one: shape[one])
    rows = max(1, CHUNK * shape[side] // (tensors[0].numel() * _WIDE * 2))
    yield from zip(*(torch.split(one, rows, side) for one in tensors), strict=True)


def _norms(found: Sequence[_Found]) -> tuple[tuple[list[torch.Tensor], list[torch.Tensor]], int]:
    """The norms of the changes and of the weights, and the bytes it took. Wide copies are overwritten with the change.

    Underscored functions, but in PyTorch's reference: one call for many parameters, as its own optimizers do.
    """
    changes: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    wide = [(before, after) for _, before, after in found if after.dtype.itemsize >= _WIDE]
    narrow = [(before, after) for _, before, after in found if after.dtype.itemsize < _WIDE]
    told: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    if wide:
        was, now = [before for before, _ in wide], [after for _, after in wide]
        torch._foreach_sub_(was, now)
        told |= zip(map(id, now), zip(torch._foreach_norm(was), torch._foreach_norm(now), strict=True), strict=True)
    parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    batches = list(_batches(narrow))
    # One memory for all: an allocator that gets and gives pieces back in turn may hold on to many of them.
    size = max(map(_elements, batches), default=0)
    scratch = torch.empty(size, dtype=torch.float32, device=found[0][2].device)
    for batch in batches:
        room = iter(
            torch.split(scratch, [one.numel() for _, *pair in batch for one in pair] + [size - _elements(batch)])
        )
        both = [next(room).view(one.shape).copy_(one) for _, *pair in batch for one in pair]
        was, now = both[::2], both[1::2]
        torch._foreach_sub_(was, now)
        for (owner, _, _), *pair in zip(batch, torch._foreach_norm(was), torch._foreach_norm(now), strict=True):
            parts.setdefault(owner, []).append((pair[0], pair[1]))
    for owner, pairs in parts.items():
        one, other = pairs[0] if len(pairs) == 1 else torch.stack([torch.stack(pair) for pair in pairs]).norm(dim=0)
        told[owner] = one, other
    for _, _, after in found:
        change, weight = told[id(after)]
        changes.append(change)
        weights.append(weight)
    return (changes, weights), scratch.nbytes


def _elements(batch: _Batch) -> int:
    return sum(2 * new.numel() for _, _, new in batch)


def _batches(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[_Batch]:
    """Pieces of (before, after), by the `id` of the whole, as many at a time as fit into `CHUNK`."""
    batch: _Batch = []
    size = 0
    for before, after in pairs:
        for old, new in _pieces(before, after):
            more = 2 * _WIDE * new.numel()
            if batch and size + more > CHUNK:
                yield batch
                batch, size = [], 0
            batch.append((id(after), old, new))
            size += more
    if batch:
        yield batch
