"""Accumulators that are no single tensor: `total = total * 0.9 + x`."""

from __future__ import annotations

from collections.abc import Sequence

from ampcheck.core.run import Where
from ampcheck.shadow.call import Call
from ampcheck.shadow.companions import Companions, CompanionStore


def follow_accumulators(call: Call, where: Where, before: Sequence[Companions], store: CompanionStore) -> None:
    """Count how often a statement such as `total = total * 0.9 + x` built on its own result.

    Its ops pass their sites on along the line; the first that meets itself in the next iteration is the one to count.
    """
    result = call.fresh[0]
    if result.dtype.itemsize > 2:
        return
    line = where.file, where.line
    sources = [
        c
        for t, c in zip(call.inputs, before, strict=True)
        if t.shape == result.shape and any(line == (site.file, site.line) for site in c.sites)
    ]
    companions = store.of(result)
    source = max(sources, key=lambda c: (c.updates, where in c.sites), default=None)
    if source is None:
        companions.sites = frozenset([where])
    elif where in source.sites:
        companions.sites, companions.updates = frozenset([where]), source.updates + 1
    else:
        companions.sites, companions.updates = source.sites, source.updates
        if not source.updates:
            companions.sites |= {where}
