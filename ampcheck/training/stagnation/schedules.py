"""Learning rates of the steps that are planned, and the share of a parameter's updates that gets lost in them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from ampcheck.core.formats import FloatFormat
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.spacing import spacing
from ampcheck.training.loop import TrainingLoop, quiet
from ampcheck.training.stagnation.forecast import LOST, Sample

_OVER = 1e-9
"""A schedule ends where the rate falls to this part of its largest."""

_ENDS = {OneCycleLR: "total_steps", CosineAnnealingLR: "T_max", PolynomialLR: "total_iters"}
"""The setting in which a schedule says its number of steps; that of a warm-up says nothing about the training."""

_FAR = 100_000
"""The most steps that a schedule plans by itself; `horizon=` may ask for more."""

_UNKNOWN = "cannot be copied: the forecast assumes that the last learning rate stays"


@dataclass(frozen=True, slots=True)
class Plan:
    """The updates of a parameter in `steps` planned steps, of which the learning rates are known.

    share: of the updates that get lost. rate: from it downwards 90 % get lost; stops: the step from which all are below
    it, None where none is. first: the rate of the observed steps; tail: the mean rate of the lost ones.
    """

    steps: int
    share: float
    rate: float
    stops: int | None
    first: float
    tail: float


@dataclass(frozen=True, slots=True)
class RoundedRate:
    """A learning rate that is kept in a tensor of 16 bits, and what rounding makes of its schedule.

    steps: the planned ones. off: the mean distance from the schedule in float64, relative to its mean rate. rounded,
    exact: the rate after the last planned step, in both.
    """

    optimizer: str
    group: int
    dtype: str
    steps: int
    off: float
    rounded: float
    exact: float


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The schedulers of an optimizer and copies of them, which step an optimizer of their own. count: how often the
    first had stepped then; at: the number of the step. narrow: the dtypes of rates that tensors of 16 bits hold, by
    group; wide: a copy in float64, where there are some."""

    originals: Sequence[LRScheduler]
    copies: Sequence[LRScheduler]
    optimizer: torch.optim.Optimizer
    count: int
    at: int
    narrow: Mapping[int, str] = field(default_factory=dict)
    wide: _Schedule | None = None


class Schedules:
    """Copies the schedulers of a loop before its first step, and steps the copies on to its end.

    unseen: those that cannot be copied.
    """

    def __init__(self) -> None:
        self._schedules: dict[str, _Schedule] = {}
        self._steps = 0
        self._planned: dict[str, list[list[float]]] = {}
        self.unseen: dict[str, int] = {}

    def begin(self, loop: TrainingLoop) -> Mapping[str, float]:
        """A step begins. Returns the learning rates by the names of parameters."""
        for path, optimizer in loop.optimizers.items():
            if path not in self._schedules:
                schedulers = [s for s in _outer(loop.reached.schedulers.values()) if s.optimizer is optimizer]
                schedule = _copied(schedulers, optimizer, self._steps) if schedulers else None
                if schedule is not None:
                    self._schedules[path] = schedule
                elif schedulers:
                    kinds = " and ".join(type(scheduler).__name__ for scheduler in schedulers)
                    self.unseen[f"{kinds} of {path} {_UNKNOWN}"] = 1
        return {name: rate for name, (_, _, rate) in rates_of(loop).items()}

    @property
    def end(self) -> int:
        """The number of steps of the longest schedule that has an end; 0 where none says it."""
        return max((_end(schedule, self._steps) for schedule in self._schedules.values()), default=0)

    def ended(self) -> None:
        """A step came to its end."""
        self._steps += 1

    def plan(
        self, optimizer: str, group: int, samples: Sequence[Sample], form: FloatFormat, horizon: int
    ) -> Plan | None:
        """What becomes of the updates of a parameter like those of `samples`; None where its rate is not planned."""
        known = [sample for sample in samples if sample.rate > 0.0]
        rates = [row[group] for row in self._rates(optimizer, horizon)] if known else []
        lost_from = [
            (spacing(sample.old[moved], form) / 2 / sample.update[moved].abs() * sample.rate)
            for sample in known
            if (moved := (sample.update != 0) & sample.update.isfinite() & sample.old.isfinite()).any()
        ]
        if not rates or not lost_from:
            return None
        borders, _ = torch.cat(lost_from).sort()  # an update is lost at this rate and below
        planned = torch.tensor(rates, dtype=torch.float64, device="cpu")
        lost = 1.0 - torch.searchsorted(borders, planned) / len(borders)
        rate = float(borders[math.floor((1.0 - LOST) * len(borders))])
        moving = (planned > rate).nonzero()
        stops = int(moving[-1]) + 1 if len(moving) else 0
        share = float(lost[planned > 0].mean())
        below = planned[(planned > 0) & (planned <= rate)]
        tail = float(below.mean()) if len(below) else rate
        return Plan(len(rates), share, rate, stops if stops < len(rates) else None, known[-1].rate, tail)

    def rounded(self, horizon: int) -> list[RoundedRate]:
        """The learning rates in 16 bits, each beside the same schedule in float64."""
        return [
            RoundedRate(path, group, dtype, len(pairs), off, pairs[-1][0], pairs[-1][1])
            for path, schedule in self._schedules.items()
            for group, dtype in schedule.narrow.items()
            if (pairs := self._beside_exact(path, group, horizon))
            and math.isfinite(off := sum(abs(a - b) for a, b in pairs) / (sum(abs(b) for _, b in pairs) or math.inf))
        ]

    def _beside_exact(self, optimizer: str, group: int, horizon: int) -> list[tuple[float, float]]:
        wide = self._schedules[optimizer].wide
        exact = [] if wide is None else [rates[group] for rates in _planned(wide, self._steps, horizon)]
        own = [rates[group] for rates in self._rates(optimizer, horizon)]
        return list(zip_longest(own, exact, fillvalue=0.0)) if exact else []

    def _rates(self, optimizer: str, horizon: int) -> list[list[float]]:
        """The rate of each group in each planned step; empty where no schedule goes on from step to step."""
        if optimizer not in self._planned:
            schedule = self._schedules.get(optimizer)
            self._planned[optimizer] = [] if schedule is None else list(_planned(schedule, self._steps, horizon))
        return self._planned[optimizer]


def rates_of(loop: TrainingLoop) -> Mapping[str, tuple[str, int, float]]:
    """By the name of a parameter its optimizer, the number of its group and its learning rate, NaN for no number."""
    names = {id(parameter): name for name, parameter in loop.parameters()}
    rates = {}
    for path, optimizer in loop.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            value = group.get("lr")
            rate = float(value) if isinstance(value, (int, float, torch.Tensor)) else math.nan
            for name in (names[id(parameter)] for parameter in group["params"] if id(parameter) in names):
                rates[name] = path, number, rate
    return rates


def _outer(schedulers: Iterable[LRScheduler]) -> list[LRScheduler]:
    """Those that no other steps. One that follows a metric has no plan."""
    known = list(schedulers)
    values = [value for scheduler in known for value in vars(scheduler).values()]
    parts = [part for value in values for part in (value if isinstance(value, (list, tuple)) else (value,))]
    inner = {id(part) for part in parts if isinstance(part, LRScheduler)}
    return [s for s in known if id(s) not in inner and not isinstance(s, ReduceLROnPlateau)]


def _copied(schedulers: list[LRScheduler], optimizer: torch.optim.Optimizer, at: int) -> _Schedule | None:
    options = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    narrow = {n: str(g["lr"].dtype).removeprefix("torch.") for n, g in enumerate(options) if _is_narrow(g.get("lr"))}
    try:
        schedule = _copy(schedulers, optimizer, options, {}, at)
        if not narrow:
            return schedule
        rounded = [tensor for _, tensor in tensors([options, list(map(vars, schedulers))]) if _is_narrow(tensor)]
        wide = _copy(schedulers, optimizer, options, {id(tensor): tensor.detach().double() for tensor in rounded}, at)
    except Exception:  # noqa: BLE001  # the user's class may hold what cannot be copied
        return None
    return replace(schedule, narrow=narrow, wide=wide)


def _copy(
    schedulers: list[LRScheduler],
    optimizer: torch.optim.Optimizer,
    options: list[dict[str, Any]],
    others: Mapping[int, object],
    at: int,
) -> _Schedule:
    """A copy of schedulers, with `others` in place of the objects of these ids."""
    groups = [{**copy.deepcopy(group, dict(others)), "params": [torch.zeros(1)]} for group in options]
    own = torch.optim.Optimizer(groups, {})
    copies = copy.deepcopy(schedulers, {**others, id(optimizer): own})
    return _Schedule(schedulers, copies, own, _taken(schedulers[0]), at)


def _is_narrow(rate: object) -> bool:
    return isinstance(rate, torch.Tensor) and rate.is_floating_point() and rate.dtype.itemsize == 2


def _end(schedule: _Schedule, steps: int) -> int:
    """The planned steps from the copy on; a scheduler may step once in several."""
    taken, ran = _taken(schedule.originals[0]) - schedule.count, steps - schedule.at
    last = max(map(_last, schedule.originals)) - schedule.count
    return min(_FAR, math.ceil(last * ran / taken)) if taken > 0 and ran > 0 else 0


def _taken(scheduler: Any) -> int:
    """The number of steps of a scheduler; a chain has it in its members."""
    inner = scheduler._schedulers[0] if isinstance(scheduler, ChainedScheduler) else scheduler
    return int(inner.last_epoch)


def _last(scheduler: Any) -> int:
    """The number of steps after which a scheduler has come to its end, by its settings; 0 where these do not say it."""
    if isinstance(scheduler, SequentialLR):
        last = _last(scheduler._schedulers[-1])
        return scheduler._milestones[-1] + last if last else 0
    if isinstance(scheduler, ChainedScheduler):
        return max(map(_last, scheduler._schedulers))
    end = next((getattr(scheduler, name) for kind, name in _ENDS.items() if isinstance(scheduler, kind)), 0)
    return int(min(end, _FAR))


def _planned(schedule: _Schedule, steps: int, horizon: int) -> Iterator[list[float]]:
    """Rates of the steps from the copy on. A scheduler may step once in several steps, and not at all."""
    taken, ran = _taken(schedule.originals[0]) - schedule.count, steps - schedule.at
    if taken <= 0 or ran <= 0:
        return
    largest, groups, stepped = 0.0, schedule.optimizer.param_groups, 0
    for step in range(horizon):
        rates = [float(group["lr"]) for group in groups]
        largest = max(largest, *rates)
        if max(rates) <= _OVER * largest and step:
            return
        yield rates
        while stepped < (step + 1) * taken / ran:
            try:
                with quiet():
                    for scheduler in schedule.copies:
                        scheduler.step()
            except Exception:  # noqa: BLE001  # a schedule that ends raises
                return
            stepped += 1
