"""The record of the updates of the narrow tensors of a loop, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.run import Coverage, Table
from ampcheck.records.stagnation import HORIZON, StagnationStats, TensorUpdates
from ampcheck.torchtools.spacing import spacing
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.stagnation.forecast import Sample, stops
from ampcheck.training.stagnation.updates import UpdateWatch, by_slot, rates_of, rounds_at_random

_ROWS = 40


def stagnation_stats(loop: TrainingLoop, watch: UpdateWatch, error: str = "") -> StagnationStats:
    """Return what the updates of the steps that ended came to. error: why the loop stopped."""
    tensors = list(watch.tensors.values())
    modules, rates = {path for path, _ in loop.modules()}, rates_of(loop)
    for updates in tensors:
        updates.settle()
    carriers = {name for updates in tensors for name in updates.carriers}
    for group in by_slot(tensors, {name for name, _ in loop.parameters()}):
        if rounds_at_random(group):
            for updates in group:
                updates.lost, updates.random = 0, True
    horizon = loop.horizon or HORIZON
    for updates in tensors:
        owner = updates.name.rpartition(".")[0]  # of the state of an optimizer, a parameter
        module = next((path for path in (owner, owner.rpartition(".")[0]) if path in modules), "")
        updates.where = replace(updates.where, module=module)
        updates.compensates = updates.name in carriers
        rate = rates.get(updates.name)
        if rate is not None and not updates.random and not updates.carriers:
            updates.rate, updates.largest = rate
            updates.lost_at_largest = _share_lost(updates.samples, updates.largest, format_of(updates.dtype))
    endless = watch.restarted | watch.iterates
    known = {n: updates.course(updates.name in endless, horizon) for n, updates in enumerate(tensors)}
    courses = {number: course for number, course in known.items() if course is not None}
    for number, stop in stops(courses, horizon).items():
        tensors[number].stop = stop
    for updates in tensors:
        updates.samples.clear()
    for constant in watch.vanished.values():
        groups = (group for optimizer in loop.optimizers.values() for group in optimizer.param_groups)
        options = (n for g in groups for n, v in g.items() if isinstance(v, float) and v == abs(constant.constant))
        constant.option = next(options, "")
    moved = sum(updates.moved for updates in tensors)
    coverage = Coverage({"tensors across steps": watch.looked, "updates of elements": moved}, watch.unseen)
    vanished = tuple(watch.vanished.values())
    return StagnationStats(
        loop.name,
        watch.steps,
        watch.looked,
        watch.narrow,
        tuple(tensors),
        vanished,
        error,
        horizon,
        coverage,
        frozenset(watch.waiting),
    )


def _share_lost(samples: Sequence[Sample], largest: float, form: FloatFormat) -> float | None:
    """The share of updates like those of `samples` that is lost at the largest rate; None where theirs is steady."""
    known = [sample for sample in samples if sample.rate > 0.0]
    if not known or not known[0].rate < known[-1].rate:
        return None
    lost = [
        sample.update[moved].abs() * max(1.0, largest / sample.rate) <= spacing(sample.old[moved], form) / 2
        for sample in known
        if (moved := (sample.update != 0) & sample.update.isfinite() & sample.old.isfinite()).any()
    ]
    return float(torch.cat(lost).double().mean()) if lost else None


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
