"""The table of the updates of narrow tensors."""

from __future__ import annotations

from ampcheck.core.run import Table
from ampcheck.records.stagnation import StagnationStats, TensorUpdates

_ROWS = 40


def stagnation_tables(stats: StagnationStats) -> tuple[Table, ...]:
    """Every narrow tensor that was updated, the worst first."""
    if not stats.tensors:
        return ()
    ranked = sorted(stats.tensors, key=lambda tensor: (-_worst(tensor), tensor.role, tensor.name))
    rows = [
        (
            *(tensor.role, tensor.name, tensor.dtype, tensor.elements, tensor.moved),
            *(tensor.share, tensor.carried / tensor.moved if tensor.moved else 0.0, tensor.relative_update),
            *(tensor.decay.factor if tensor.decay.looked else None, tensor.decay.share),
            *((tensor.stop.gain, tensor.stop.distance, tensor.stop.steps) if tensor.stop else (None, None, None)),
        )
        for tensor in ranked[:_ROWS]
    ]
    columns = (
        *("role", "tensor", "dtype", "elements", "updates", "lost", "carried elsewhere", "relative update"),
        *("decay factor", "decay lost", "keeps of itself", "never closes", "stops after steps"),
    )
    left = len(ranked) - len(rows)
    note = f"{left} more tensors are not listed" if left else ""
    return (Table("Updates of tensors narrower than float32", columns, rows, "stagnation", note),)


def _worst(tensor: TensorUpdates) -> float:
    return max(tensor.share, tensor.decay.share, tensor.stop.distance if tensor.stop else 0.0)
