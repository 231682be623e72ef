"""Measure whether the updates of narrow tensors change anything, and report it in tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ampcheck.catalog.training import STAGNATION
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Table
from ampcheck.training.lineage import VanishedConstant
from ampcheck.training.loop import Role, TrainingLoop
from ampcheck.training.stagnation.cures import measure_cures
from ampcheck.training.stagnation.updates import Accumulation, TensorUpdates, UpdateWatch, rounds_at_random

_ROWS = 40
_LONGEST = 8192
_MOST = 0.5


@dataclass(frozen=True, slots=True)
class StagnationStats:
    """What became of the updates of a loop in `steps` observed steps.

    looked: tensors that live across steps; narrow: those of them narrower than float32. error: why the loop stopped.
    """

    subject: str
    steps: int
    looked: int
    narrow: int
    tensors: tuple[TensorUpdates, ...] = ()
    vanished: tuple[VanishedConstant, ...] = ()
    error: str = ""
    coverage: Coverage = field(default_factory=Coverage)


def stagnation_stats(loop: TrainingLoop, watch: UpdateWatch, error: str = "") -> StagnationStats:
    """What the updates of the steps that ended came to. error: why the loop stopped."""
    tensors = list(watch.tensors.values())
    modules, rates = {path for path, _ in loop.modules()}, _rates(loop)
    carriers = {name for updates in tensors for name in updates.carriers}
    for updates in tensors:
        updates.optimizer, updates.rate = rates.get(updates.name, ("", 1.0))
        owner = updates.name.rpartition(".")[0]  # of the state of an optimizer, a parameter
        updates.module = next((path for path in (owner, owner.rpartition(".")[0]) if path in modules), "")
        updates.compensates = updates.name in carriers
        exempt = updates.compensates or updates.name in watch.restarted
        updates.accumulation = None if exempt else _accumulation(updates)
    for role in {updates.role for updates in tensors}:
        group = [updates for updates in tensors if updates.role == role]
        if rounds_at_random(group):
            for updates in group:
                updates.lost = 0
    _measure_cures(tensors)
    for updates in tensors:
        updates.samples.clear()
    for constant in watch.vanished.values():
        groups = (group for optimizer in loop.optimizers.values() for group in optimizer.param_groups)
        options = (n for g in groups for n, v in g.items() if isinstance(v, float) and v == abs(constant.constant))
        constant.option = next(options, "")
    moved = sum(updates.moved for updates in tensors)
    coverage = Coverage({"tensors across steps": watch.looked, "updates of elements": moved}, dict(watch.unseen))
    vanished = tuple(watch.vanished.values())
    return StagnationStats(
        loop.name, watch.steps, watch.looked, watch.narrow, tuple(tensors), vanished, error, coverage
    )


def stagnation_tables(stats: StagnationStats) -> tuple[Table, ...]:
    """Every narrow tensor that was updated, the worst first; with the cures where they were measured."""
    if not stats.tensors:
        return ()
    ranked = sorted(stats.tensors, key=lambda one: (-max(one.share, one.bad_decay.share), one.role, one.name))
    rows = [
        (
            *(one.role, one.name, one.dtype, one.elements, one.moved),
            *(one.share, one.carried / one.moved if one.moved else 0.0, one.relative_update),
            *(one.bad_decay.factor if one.bad_decay.looked else None, one.bad_decay.share),
            *(one.accumulation.steps if one.accumulation else None,),
        )
        for one in ranked[:_ROWS]
    ]
    columns = (
        *("role", "tensor", "dtype", "elements", "updates", "lost", "carried elsewhere", "relative update"),
        *("decay factor", "decay lost", "stops after steps"),
    )
    left = len(ranked) - len(rows)
    note = f"{left} more tensors are not listed" if left else ""
    tables = [Table("Updates of tensors narrower than float32", columns, rows, STAGNATION.slug, note)]
    cures = [(one.name, *(f"{c.arrives:.3f} (error {c.error:.3f})" for c in one.cures)) for one in ranked if one.cures]
    if cures:
        names = next(tuple(c.name for c in one.cures) for one in ranked if one.cures)
        text = (
            "the share of the true displacement that arrives, and the relative error, of the observed updates replayed"
        )
        tables.append(Table("What would arrive", ("tensor", *names), cures, STAGNATION.slug, text))
    return tuple(tables)


def _rates(loop: TrainingLoop) -> Mapping[str, tuple[str, float]]:
    """The optimizer of each parameter and its learning rate there, 1.0 where it is zero or not a number."""
    names = {id(parameter): name for name, parameter in loop.parameters()}
    found = {}
    for path, optimizer in loop.optimizers.items():
        for group in optimizer.param_groups:
            given = group.get("lr")
            rate = float(given) if isinstance(given, (int, float, torch.Tensor)) else 1.0
            for parameter in group["params"]:
                if id(parameter) in names:
                    found[names[id(parameter)]] = (path, rate if 0.0 < rate < math.inf else 1.0)
    return found


def _accumulation(one: TensorUpdates) -> Accumulation | None:
    """Where a tensor stops that adds to itself in each observed step, two of them at least, and is never reset."""
    factors = one.factors
    adds = len(factors) > 1 and all(factor == 1.0 for factor in factors) and (one.low < 0.0) != (one.high > 0.0)
    if one.role == Role.PARAMETER.value or not adds or one.set_anew or one.carried:
        return None
    increments = torch.cat([update[update != 0].abs() for _, update in one.samples])
    old, update = one.samples[-1]
    if not increments.numel():
        return None
    form, increment = format_of(one.dtype), float(increments.median())
    now = float((old + update).abs().median())
    stops_at = math.ldexp(1.0, math.ceil(math.log2(2.0 * increment)) + form.mantissa_bits)
    return Accumulation(increment, min(stops_at, form.max), max(0, math.ceil((stops_at - now) / increment)))


def _measure_cures(tensors: Sequence[TensorUpdates]) -> None:
    """Cures are measured for the worst tensor of each role, of lost updates, of lost decay and of accumulation."""
    worst: dict[int, TensorUpdates] = {}
    for role in {one.role for one in tensors}:
        here = [one for one in tensors if one.role == role and not one.compensates]
        ranks: tuple[Callable[[TensorUpdates], float], ...] = (
            lambda one: one.share,
            lambda one: one.bad_decay.share if one.share <= _MOST else 0.0,
            lambda one: float(one.accumulation is not None),
        )
        for rank in ranks:
            top = max(here, key=rank, default=None)
            if top is not None and rank(top) > _MOST:
                worst[id(top)] = top
    for one in worst.values():
        factor = one.bad_decay.factor if one.share <= _MOST and one.bad_decay.share > _MOST else None
        length = min(_LONGEST, 2 * one.accumulation.steps) if one.accumulation else None
        one.cures = measure_cures(one.samples, getattr(torch, one.dtype), factor=factor, steps=length)
