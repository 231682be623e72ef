"""Accumulators that are no single tensor: `total = total * 0.9 + x`."""

from __future__ import annotations

from collections.abc import Sequence

from ampcheck.core.run import Where
from ampcheck.shadow.call import Call
from ampcheck.shadow.companions import Companions, CompanionStore


def follow_accumulators(call: Call, where: Where, before: Sequence[Companions], store: CompanionStore) -> None:
    """Count how often a statement such as `total = total * 0.9 + x` built on its own result.

    The result of its last op is passed on by the ops of the same line to the same op of the next iteration.
    """
    result = call.fresh[0]
    if result.dtype.itemsize > 2:
        return
    line = where.file, where.line
    sources = [
        c
        for t, c in zip(call.inputs, before, strict=True)
        if c.site and line == (c.site.file, c.site.line) and t.shape == result.shape
    ]
    companions = store.of(result)
    if not sources:
        companions.site = where
        return
    source = max(sources, key=lambda c: c.updates)
    companions.site, companions.updates = source.site, source.updates + (source.site == where)
