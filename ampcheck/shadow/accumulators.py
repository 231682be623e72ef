"""Values that build on themselves: accumulators that are written in place, and sums that are no single tensor."""

from __future__ import annotations

import torch

from ampcheck.core.run import Where
from ampcheck.facts.history import Part, Past
from ampcheck.facts.memory import has_companions
from ampcheck.facts.values import Companions, CompanionStore
from ampcheck.shadow.call import Call

_ACCUMULATES = 8
"""Writes in a row that build on the value before, from which a value counts as an accumulator."""

_MOST_SITES = 64
"""Ops in one iteration of a loop; a deep model rounds its residual stream at as many places, and never twice at one."""

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
    if call.traits.resets and source is not None:
        past = _past(store.of(source), source)
        if source.itemsize > tensor.itemsize:
            past = _rounded(call, tensor, [past])
    elif call.traits.resets:
        past = _NEVER
    else:
        updates, sites = _past(companions, tensor)
        past = updates + 1, sites
    part = _part(tensor, companions)
    companions.updates = past[0]
    if part is None:
        companions.sites, companions.parts = past[1], {}
    else:
        companions.parts[part] = past


def is_accumulator(call: Call, tensor: torch.Tensor, companions: Companions) -> bool:
    """Return whether a result has built on itself for long: not what is made of it elsewhere."""
    if companions.updates < _ACCUMULATES:
        return False
    return any(t is tensor for t in call.written) or _is_on_line(companions.sites, call.where)


def _is_on_line(sites: frozenset[Where], where: Where) -> bool:
    for site in sites:  # noqa: SIM110  # asked for each op
        if site.line == where.line and site.file == where.file:
            return True
    return False


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
    """Count how often a value of 16 bits was rounded that builds on its own earlier value, as in
    `total = total * 0.9 + x`, or `state = (state.float() * decay + x).to(torch.bfloat16)`.

    The ops that round pass their sites on, along a line and through linear ops in any format; the first that meets
    itself in the next iteration is the one to count.
    """
    result, sources = call.fresh[0], list[Past]()
    for tensor, known in zip(call.inputs, call.before, strict=True):
        if (known.sites or known.parts) and tensor.shape == result.shape:
            past = _past(known, tensor) if known.parts else (known.updates, known.sites)
            if call.traits.linear or _is_on_line(past[1], call.where):
                sources.append(past)
    if sources or result.itemsize <= 2:
        companions = call.after[len(call.written)]
        companions.updates, companions.sites = _rounded(call, result, sources)


def _rounded(call: Call, result: torch.Tensor, sources: list[Past]) -> Past:
    """How a result was written: one more time if an op that rounds to 16 bits meets itself."""
    where = call.where
    if not sources:
        return 0, frozenset((where,))
    updates, sites = sources[0]
    if len(sources) > 1:
        updates, sites = max(sources, key=lambda it: (where in it[1], it[0]))
    if result.itemsize > 2:
        return updates, sites
    if where in sites:
        return updates + 1, frozenset([where])
    if updates >= _ACCUMULATES:
        return updates, sites
    return updates, (sites if len(sites) < _MOST_SITES else frozenset()) | {where}
