"""Measures the updates of the narrow tensors of a loop."""

from __future__ import annotations

from dataclasses import replace

from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage
from ampcheck.records.stagnation import (
    HORIZON,
    StagnationStats,
)
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.stagnation.forecast import stops
from ampcheck.training.stagnation.rates import rates_of, share_lost
from ampcheck.training.stagnation.updates import UpdateWatch, by_slot, rounds_at_random


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
            updates.lost_at_largest = share_lost(updates.samples, updates.largest, format_of(updates.dtype))
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
