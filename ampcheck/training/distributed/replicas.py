"""Replicas of a parameter stay equal to the bit: the values that ranks hold are compared after each step.

All ranks apply the same sum of gradients to the same values with the same kernels, so rounding tells no replica from
another: the bound of their distance is zero. While steps run nothing is sent; each rank keeps digests. Gradients are
not compared for a verdict, since ranks that share the optimizer's work (ZeRO) may leave them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Where
from ampcheck.health import Unmeasured
from ampcheck.health.values import values_of
from ampcheck.records.protocol import OF_STEPS, Act, Event
from ampcheck.records.reductions import Drift, ReplicaStats, name_ranks
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.storage import is_pending, placements
from ampcheck.training.distributed.ranks import gather, grouped, world_size
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.state_dtypes.measure import sum_of_bits

_BY_CHANCE = 16
"""Elements from which on equal values are no chance: the first step of Adam moves each by the rate, up or down."""


class Layout(NamedTuple):
    """Replicas have the same. position: of a shard, in the dimensions of the mesh that shard the parameter."""

    shape: tuple[int, ...]
    dtype: str
    position: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Of the part on this rank."""
        return math.prod(self.shape)


@dataclass(slots=True)
class ReplicaStep:
    """One step of one rank, by parameter.

    values: the bits when its first backward pass begins. gradients: the bits of its gradient, zeros left out, each time
    that a backward pass begins or ends, and that a scaler or an optimizer begins. averaged: the ranks over which DDP
    was to average it. alone: whether DDP was not to, in the last backward pass. rates, scales, skips: of the calls of
    the step, in their order.
    """

    values: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, list[int]] = field(default_factory=dict)
    averaged: dict[str, tuple[int, ...]] = field(default_factory=dict)
    alone: bool = False
    rates: list[tuple[float, ...]] = field(default_factory=list)
    scales: tuple[float | None, ...] = ()
    skips: tuple[bool, ...] = ()


@dataclass(slots=True)
class RankReplicas:
    """The steps of one rank. varied: parameters with more than one value at the start. mesh: the ranks that hold the
    shards of its parameters."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    varied: set[str] = field(default_factory=set)
    mesh: tuple[int, ...] = ()
    steps: dict[int, ReplicaStep] = field(default_factory=dict)


class ReplicaWatch:
    """Records the values and gradients of trained parameters, where several ranks work together."""

    def __init__(self, loop: TrainingLoop) -> None:
        self.record = RankReplicas()
        self._loop, self._names = loop, dict[int, str]()

    def look(self, number: int, optimizer: torch.optim.Optimizer | None = None, *, in_pass: bool = False) -> None:
        """Look at a step where a backward pass begins (in_pass) or ends, and a scaler or optimizer begins."""
        if world_size() < 2:
            return
        with torch.no_grad(), without_modes():
            trained = {
                self._names.setdefault(id(p), name): p
                for name, p in self._loop.parameters()
                if p.requires_grad and not is_pending(p)
            }
            step = self.record.steps.get(number)
            if step is None:
                step = self.record.steps[number] = ReplicaStep({n: _bits(p) for n, p in trained.items()})
                self._describe(trained)
            for name, parameter in trained.items():
                grad = parameter.grad
                if grad is not None and not is_pending(grad) and (bits := _bits(grad)):
                    step.gradients.setdefault(name, []).append(bits)
            if optimizer is not None:
                step.rates.append(tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups))
            if in_pass:
                self._look_at_ddp(step)

    def _describe(self, trained: Mapping[str, Any]) -> None:
        for name, parameter in trained.items():
            if name not in self.record.layouts:
                part, parts = values_of(parameter), placements(parameter)
                if isinstance(part, Unmeasured):
                    continue
                position = parameter.device_mesh.get_coordinate() or () if parts else ()
                split = tuple(at for at, kind in zip(position, parts, strict=False) if not kind.is_replicate())
                self.record.layouts[name] = Layout(tuple(part.shape), str(part.dtype), split)
                if split:
                    self.record.mesh = tuple(parameter.device_mesh.mesh.flatten().tolist())
                if part.numel() and bool((part != part.flatten()[0]).any()):
                    self.record.varied.add(name)

    def _look_at_ddp(self, step: ReplicaStep) -> None:
        for _, module in self._loop.modules():
            if isinstance(module, DistributedDataParallel):
                step.alone = not module.require_backward_grad_sync
                if not step.alone and not getattr(module, "_comm_hooks", ()):  # a hook may average over a part of them
                    ranks = tuple(dist.get_process_group_ranks(module.process_group))
                    ignored = module.parameters_to_ignore
                    own = (p for name, p in module.module.named_parameters() if name not in ignored)
                    step.averaged |= {self._names[id(p)]: ranks for p in own if id(p) in self._names}

    def result(self, events: Sequence[Event]) -> RankReplicas:
        """The record, with the calls of the scaler in each step."""
        for number, step in self.record.steps.items():
            calls = [event for event in events if event.step == number and event.act is Act.SCALER_STEP]
            step.scales = tuple(event.scale for event in calls if event.enabled)
            step.skips = tuple(event.skipped for event in calls if event.enabled)
        return self.record


def _bits(tensor: torch.Tensor) -> int:
    values = values_of(tensor)
    return 0 if isinstance(values, Unmeasured) else sum_of_bits(values)


def compare_ranks(own: RankReplicas) -> tuple[Drift | None, Coverage]:
    """Where ranks part, and how many parameters begin equal on two of them. Every rank must call it; a callable may
    have left its group by then."""
    if world_size() < 2 and not own.steps:
        return None, Coverage()
    with grouped():
        ranks = gather(own)
    pairs = ((name, _series(name, one, other)) for name, _, one, other in _pairs(ranks))
    equal = {name for name, series in pairs if series and series[0][1]}
    return find_drift(ranks), Coverage({"replicated parameters": len(equal)})


def find_drift(ranks: Sequence[RankReplicas]) -> Drift | None:
    """Where replicas, or the calls of ranks that hold the shards of one model, first part for good."""
    parted: dict[tuple[bool, int, tuple[int, int]], list[str]] = {}
    for name, pair, one, other in _pairs(ranks):
        if (step := _parting(name, one, other)) is not None:
            proven = _are_replicas(name, pair, one, other, step)
            if proven or (name in one.varied and one.layouts[name].numel >= _BY_CHANCE):
                parted.setdefault((not proven, step, pair), []).append(name)
    if parted:
        (unproven, step, pair), names = min(parted.items())
        first, second = (ranks[rank].steps[step] for rank in pair)
        names = sorted({n for (loose, *_), of in parted.items() for n in of if loose == unproven})
        return Drift(step, pair, tuple(names), *_cause(names, pair, first, second), proven=not unproven)
    return next(_parted_shards(ranks), None)


def _pairs(ranks: Sequence[RankReplicas]) -> Iterator[tuple[str, tuple[int, int], RankReplicas, RankReplicas]]:
    """Each parameter with two ranks whose values of it have the same layout; ranks of equal values count once."""
    for name in dict.fromkeys(name for rank in ranks for name in rank.layouts):
        kinds: dict[object, list[int]] = {}
        for number, rank in enumerate(ranks):
            if name in rank.layouts:
                values = tuple((n, step.values.get(name), step.averaged.get(name)) for n, step in rank.steps.items())
                kinds.setdefault((rank.layouts[name], values), []).append(number)
        first = [same[0] for same in kinds.values()] if len(kinds) > 1 else next(iter(kinds.values()))[:2]
        for pair in combinations(first, 2):
            one, other = (ranks[rank] for rank in pair)
            if one.layouts[name] == other.layouts[name]:
                yield name, pair, one, other


def _series(name: str, one: RankReplicas, other: RankReplicas) -> list[tuple[int, bool]]:
    """The steps in which two ranks have a parameter, and whether its values were equal when they began."""
    both = ((number, step, other.steps.get(number)) for number, step in one.steps.items())
    known = ((n, a.values.get(name), b.values.get(name)) for n, a, b in both if b is not None)
    return [(number, mine == theirs) for number, mine, theirs in known if mine is not None and theirs is not None]


def _parting(name: str, one: RankReplicas, other: RankReplicas) -> int | None:
    """The step that set two equal replicas apart; None where a later one makes them equal again, as by an average."""
    series = _series(name, one, other)
    apart = next((place for place, (_, same) in enumerate(series) if not same), 0)
    if not apart or any(same for _, same in series[apart:]):
        return None
    return series[apart - 1][0]


def _are_replicas(name: str, pair: tuple[int, int], one: RankReplicas, other: RankReplicas, last: int) -> bool:
    """Return whether a gradient was equal on both, DDP was to average it, or values were equal after they had
    changed."""
    steps = [(step, other.steps[number]) for number, step in one.steps.items() if number in other.steps]
    if any(pair[1] in a.averaged.get(name, ()) for a, _ in steps):
        return True
    if any(not set(a.gradients.get(name, ())).isdisjoint(b.gradients.get(name, ())) for a, b in steps):
        return True
    kept = [step.values[name] for number, step in one.steps.items() if number <= last and name in step.values]
    return one.layouts[name].numel >= _BY_CHANCE and len(set(kept)) > 1


def _parted_shards(ranks: Sequence[RankReplicas]) -> Iterator[Drift]:
    """Ranks that hold the shards of one model, and step them by other rates or scales."""
    for pair in combinations(range(len(ranks)), 2):
        one, other = (ranks[rank] for rank in pair)
        if one.mesh == other.mesh != () and set(pair) <= set(one.mesh) and one.layouts.keys() == other.layouts.keys():
            for number in sorted(one.steps.keys() & other.steps.keys()):
                if (cause := _by_calls(pair, one.steps[number], other.steps[number])) is not None:
                    yield Drift(number, pair, (), *cause)
                    return


_Cause = tuple[Act, str, str, bool]


def _by_calls(pair: tuple[int, int], one: ReplicaStep, other: ReplicaStep) -> _Cause | None:
    def apart(what: str, values: Sequence[Any]) -> str:
        first, second = values
        return f"{what} {_shown(first)} on rank {pair[0]} and {_shown(second)} on rank {pair[1]}"

    if one.scales != other.scales:
        hint = "load the scaler's state on every rank, and let all back off together"
        return Act.SCALER_STEP, apart("the loss scale is", (one.scales, other.scales)), hint, True
    if one.skips != other.skips:
        skipping = [rank for rank, step in zip(pair, (one, other), strict=True) if any(step.skips)]
        hint = "decide on all ranks together: all_reduce what the scaler found, or let it look at averaged gradients"
        return Act.SCALER_STEP, f"scaler.step skipped the optimizer on {name_ranks(skipping)} alone", hint, True
    if len(one.rates) != len(other.rates):
        hint = "let every rank make the same number of steps"
        counts = (len(one.rates), len(other.rates))
        return Act.OPTIMIZER_STEP, apart("the steps of optimizers were", counts), hint, False
    if one.rates != other.rates:
        hint = "compute the learning rate from what all ranks share: the step, or a progress that is all-reduced"
        return Act.OPTIMIZER_STEP, apart("the learning rate is", (one.rates, other.rates)), hint, False
    return None


def _shown(values: object) -> str:
    if isinstance(values, (list, tuple)):
        return ", ".join(map(_shown, values)) or "none"
    return f"{values:.6g}" if isinstance(values, (int, float)) else str(values)


def _cause(names: Sequence[str], pair: tuple[int, int], one: ReplicaStep, other: ReplicaStep) -> _Cause:
    """The call that set replicas apart, and what of it differs."""
    if (cause := _by_calls(pair, one, other)) is not None:
        return cause
    seen = [(one.gradients[n], other.gradients[n]) for n in names if n in one.gradients and n in other.gradients]
    if seen and all(mine[-1] == theirs[-1] for mine, theirs in seen):
        hint = "load the optimizer's state on every rank; draw noise from a generator with the same seed on all"
        return Act.OPTIMIZER_STEP, "its gradients are equal on both ranks, and its update is not", hint, False
    if one.alone or other.alone:
        hint = "leave no_sync() before the last micro-batch of a step: its backward pass averages what has accumulated"
        text = "the last backward pass before the step ran under no_sync(), so its gradients stay on their rank"
        return Act.BACKWARD, text, hint, False
    was_equal = any(not set(mine).isdisjoint(theirs) for mine, theirs in seen)
    text = "its gradients were averaged and then changed" if was_equal else "its gradients were not averaged"
    hint = "average gradients after the last backward pass of a step, and change them on all ranks alike"
    return Act.BACKWARD, text, hint, False


def judge_replicas(subject: str, drift: Drift | None, events: Sequence[Event]) -> list[Finding]:
    """Ranks that hold one model step it alike: `reduce-precision`, of a loss scale `scaler-protocol`."""
    if drift is None or not drift.proven:
        return []
    return findings(ReplicaStats(subject, drift, _place_of(drift, events)), Limits())


def _place_of(drift: Drift, events: Sequence[Event]) -> Where:
    """The last call in the step of a drift that is at fault, on this rank."""
    acts = OF_STEPS if drift.act in OF_STEPS else (drift.act,)
    calls = [event for event in events if event.step == drift.step and event.act in acts]
    call = next((event for event in reversed(calls) if event.act is drift.act), calls[-1] if calls else None)
    return Where("update", step=drift.step) if call is None else call.where
