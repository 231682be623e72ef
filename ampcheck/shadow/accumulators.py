"""Values that build on themselves: sums that are no single tensor, and averages that stand still."""

from __future__ import annotations

from typing import TypeAlias

import torch

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.shadow.bounds import Examination
from ampcheck.shadow.call import Call
from ampcheck.shadow.companions import Companions, CompanionStore, has_companions
from ampcheck.shadow.slopes import follow_slopes, kept
from ampcheck.torchtools.spacing import spacing

FAR = 0.2
"""An average that stays off what it follows by this part of its size has lost it."""

STALLED = "its last writes changed nothing, and a distance below this part of its size never will"

_FIRST, _WINDOW = 8, 12
"""The write at which a value is looked at first, and writes between two looks: an average of one, two, three, four or
six writes a step is in the same phase at each."""

_LOST = 0.9
_SAMPLE = 256
_SCALES = frozenset("mul div lerp".split())
_ADDS = frozenset("add sub addcmul addcdiv index_add scatter_add".split())


Part: TypeAlias = "tuple[int, torch.Size, tuple[int, ...]]"
"""A part of a storage: offset, shape and strides."""

Past: TypeAlias = "tuple[int, frozenset[Where]]"
"""How many writes in a row built on the previous value, and the ops that made it."""

_NEVER: Past = (0, frozenset())


class Decay:
    """What writes kept of a value: the product of their gains, and how many of them took something away. looks: its
    real and exact values at the last looks."""

    __slots__ = ("gain", "looks", "reductions", "writes")

    def __init__(self) -> None:
        self.gain, self.reductions, self.writes = 1.0, 0, 0
        self.looks: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self, gain: float) -> Decay:
        """Book a write that keeps the part `gain` of the value."""
        self.gain *= gain
        self.reductions += gain < 1.0
        self.writes += 1
        return self


def note_write(call: Call, tensor: torch.Tensor, companions: Companions, store: CompanionStore) -> None:
    """Book a write to a tensor: `total += x`, or a copy of what was made of it, as in `totals[i] = totals[i] + x`."""
    source = call.args[1] if call.name == "copy_" and has_companions(call.args[1]) else None
    if (
        source is not None
        and source.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        and _part(source, companions) == _part(tensor, companions)
    ):
        return  # `totals[i] += x` copies the part to itself once it is written
    low = tensor.dtype.itemsize <= 2
    gain = _gain(call, tensor, companions, store, read=id(companions) in call.read) if low else None
    companions.writes += 1
    companions.slopes = ()
    companions.decay = None if gain is None else (companions.decay or Decay()).note(gain)
    if call.schema.resets:
        past = _past(store.of(source), source) if source is not None else _NEVER
        if gain is not None:  # a copy of what was made of the tensor, in a wider format or another line
            past = max(past[0], _past(companions, tensor)[0] + 1), past[1]
    else:
        updates, sites = _past(companions, tensor)
        past = updates + 1, sites
    part = _part(tensor, companions)
    companions.updates = past[0]
    if part is None:
        companions.sites, companions.parts = past[1], {}
    else:
        companions.parts[part] = past


def _past(companions: Companions, tensor: torch.Tensor) -> Past:
    """How a tensor was written: as the whole storage, or as a part of one of which parts are written by themselves."""
    part = _part(tensor, companions)
    if part is None or not companions.parts:
        return companions.updates, companions.sites
    return companions.parts.get(part, _NEVER)


def _part(tensor: torch.Tensor, companions: Companions) -> Part | None:
    """The part of the storage that a tensor is; None for all of it."""
    if tensor.numel() >= companions.numel:
        return None
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def follow_accumulators(call: Call, store: CompanionStore) -> None:
    """Count how often a statement such as `total = total * 0.9 + x` built on its own result.

    Its ops pass their sites on along the line; the first that meets itself in the next iteration is the one to count.
    """
    follow_slopes(call, store)
    result = call.fresh[0]
    if result.dtype.itemsize > 2:
        return
    where, line = call.where, (call.where.file, call.where.line)
    pairs = [(c, t) for t, c in zip(call.inputs, call.before, strict=True) if t.shape == result.shape]
    found = [(c, t, _past(c, t)) for c, t in pairs]
    sources = [it for it in found if any(line == (site.file, site.line) for site in it[2][1])]
    companions = store.of(result)
    if not sources:
        companions.sites = frozenset([where])
        return
    source, tensor, (updates, sites) = max(sources, key=lambda it: (it[2][0], where in it[2][1]))
    gain = _gain(call, tensor, source, store, read=False)
    companions.decay = None if gain is None else (source.decay or Decay()).note(gain)
    if where in sites:
        companions.sites, companions.updates = frozenset([where]), updates + 1
    else:
        companions.sites, companions.updates = sites, updates
        if not updates:
            companions.sites |= {where}


def _gain(
    call: Call, tensor: torch.Tensor, companions: Companions, store: CompanionStore, *, read: bool
) -> float | None:
    """What an op keeps of a tensor that it writes, or builds on; None where that is not known.

    read: another op has read it since the last write: what is added may be made of it.
    """
    name = call.schema.base
    if "batch_norm" in name:
        return 1.0 - float(call.argument("momentum", 0.0)) if call.argument("training", True) else 1.0
    share = kept(call, tensor, companions, store)
    if tensor.requires_grad and name in _ADDS:  # a weight, whose decay makes it no average
        share = None
    if call.schema.resets:
        return share or None
    if share is not None and (share != 1.0 or name in _SCALES):
        return share
    return 1.0 if name in _ADDS and not read else None


def stalled(tensor: torch.Tensor, exact: torch.Tensor, companions: Companions) -> Examination | None:
    """The error that an average can never lose, whose last writes all changed nothing; None for any other.

    A write takes away 1 - gain of the distance to what is averaged, which changes nothing once it is at most half of
    the spacing of the value.
    """
    decay = companions.decay
    if decay is None or decay.writes % _WINDOW != _FIRST:
        return None
    step = max(1, tensor.numel() // _SAMPLE)
    real, wide = (side.detach().reshape(-1)[::step].double().clone() for side in (tensor, exact))
    gain, reductions = decay.gain, decay.reductions
    decay.gain, decay.reductions, decay.looks = 1.0, 0, [*decay.looks[-2:], (real, wide)]
    if not reductions or not 0.0 < gain < 1.0 or len(decay.looks) < 3:
        return None
    (first, then), (second, later), (value, now) = decay.looks
    moved = ((then != later) | (later != now)) & now.isfinite() & (value != 0)
    still = moved & (first == second) & (second == value)
    if not int(still.sum()) > _LOST * int(moved.sum()):
        return None
    never = spacing(value, format_of(tensor.dtype)) / 2 / (1.0 - gain ** (1.0 / reductions)) / value.abs()
    error = float(never[moved].median())
    return Examination(tensor.numel(), flagged=1, error=error, limit=FAR) if error > FAR else None
