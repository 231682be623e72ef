"""Values that build on themselves: accumulators that are written in place, and sums that are no single tensor."""

from __future__ import annotations

import torch

from ampcheck.facts.history import Part, Past
from ampcheck.facts.memory import has_companions
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.shadow.call import Call

_NEVER: Past = (0, frozenset())


def note_write(call: Call, tensor: torch.Tensor, companions: Companions, store: CompanionStore) -> None:
    """Book a write to a tensor: `total += x`, or a copy of what was made of it, as in `totals[i] = totals[i] + x`."""
    source = call.args[1] if call.name == "copy_" and has_companions(call.args[1]) else None
    if (
        source is not None
        and source.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        and _part(source, companions) == _part(tensor, companions)
    ):
        return  # `totals[i] += x` copies the part to itself once it is written
    if call.traits.resets:
        past = _past(store.of(source), source) if source is not None else _NEVER
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
    """Return how a tensor was written: as the whole storage, or as a part of one of which parts are written by
    themselves."""
    part = _part(tensor, companions)
    if part is None or not companions.parts:
        return companions.updates, companions.sites
    return companions.parts.get(part, _NEVER)


def _part(tensor: torch.Tensor, companions: Companions) -> Part | None:
    """The part of the storage that a tensor is; None for all of it."""
    if tensor.numel() >= companions.numel:
        return None
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def follow_accumulators(call: Call) -> None:
    """Count how often a statement such as `total = total * 0.9 + x`, in 16 bits, built on its own result.

    Its ops pass their sites on along the line; the first that meets itself in the next iteration is the one to count.
    """
    result = call.fresh[0]
    where, line = call.where, (call.where.file, call.where.line)
    sources: list[Past] = []
    for tensor, known in zip(call.inputs, call.before, strict=True):
        if (known.sites or known.parts) and tensor.shape == result.shape:
            past = _past(known, tensor)
            sources += [past] if any(line == (site.file, site.line) for site in past[1]) else []
    companions = call.after[len(call.written)]
    if not sources:
        companions.sites = frozenset([where])
        return
    updates, sites = max(sources, key=lambda it: (it[0], where in it[1]))
    if where in sites:
        companions.sites, companions.updates = frozenset([where]), updates + 1
    else:
        companions.sites, companions.updates = sites if updates else sites | {where}, updates
