"""Tables of the updates of narrow tensors, and of what cures would have made of them."""

from __future__ import annotations

from ampcheck.catalog.training import STAGNATION
from ampcheck.core.run import Table
from ampcheck.training.stagnation.stagnation import StagnationStats
from ampcheck.training.stagnation.updates import TensorUpdates

_ROWS = 40


def stagnation_tables(stats: StagnationStats) -> tuple[Table, ...]:
    """Every narrow tensor that was updated, the worst first; with the cures where they were measured."""
    if not stats.tensors:
        return ()
    ranked = sorted(stats.tensors, key=lambda tensor: (-_worst(tensor), tensor.role, tensor.name))
    rows = [
        (
            *(tensor.role, tensor.name, tensor.dtype, tensor.elements, tensor.moved),
            *(tensor.share, tensor.carried / tensor.moved if tensor.moved else 0.0, tensor.relative_update),
            *(tensor.decay.factor if tensor.decay.looked else None, tensor.decay.share),
            *((tensor.stop.gain, tensor.stop.distance, tensor.stop.steps) if tensor.stop else (None, None, None)),
            *((tensor.plan.rate, tensor.plan.stops) if tensor.plan else (None, None)),
        )
        for tensor in ranked[:_ROWS]
    ]
    columns = (
        *("role", "tensor", "dtype", "elements", "updates", "lost", "carried elsewhere", "relative update"),
        *("decay factor", "decay lost", "keeps of itself", "never closes", "stops after steps"),
        *("stands still below rate", "from step"),
    )
    left = len(ranked) - len(rows)
    note = f"{left} more tensors are not listed" if left else ""
    tables = [Table("Updates of tensors narrower than float32", columns, rows, STAGNATION.slug, note)]
    cures = [
        (tensor.name, *(f"{c.arrives:.3f} (error {c.error:.3f})" for c in tensor.cures))
        for tensor in ranked
        if tensor.cures
    ]
    if cures:
        names = next(tuple(c.name for c in tensor.cures) for tensor in ranked if tensor.cures)
        note = "the share of the true displacement of the replayed updates that arrives, and the relative error"
        tables.append(Table("What would arrive", ("tensor", *names), cures, STAGNATION.slug, note))
    return tuple(tables)


def _worst(tensor: TensorUpdates) -> float:
    return max(tensor.share, tensor.decay.share, tensor.stop.distance if tensor.stop else 0.0)
