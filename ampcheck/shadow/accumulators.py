"""Statements that build on their own results, as running sums and moving averages do."""

from __future__ import annotations

from ampcheck.core.run import Where
from ampcheck.shadow.call import Call
from ampcheck.shadow.companions import Companions, CompanionStore


def follow_accumulators(call: Call, where: Where, before: list[Companions], store: CompanionStore) -> None:
    """Count how often a statement such as `total = total * 0.9 + x` built on its own result.

    The result of its last op is passed on by the ops of the same line to the same op of the next iteration.
    """
    result = call.fresh[0]
    if result.dtype.itemsize > 2:
        return
    sources = [c for t, c in zip(call.inputs, before, strict=True) if c.site and t.shape == result.shape]
    same_line = [c for c in sources if c.site and (c.site.file, c.site.line) == (where.file, where.line)]
    companions = store.of(result)
    if not same_line:
        companions.site = where
        return
    source = max(same_line, key=lambda c: c.updates)
    companions.site, companions.updates = source.site, source.updates + (source.site == where)
