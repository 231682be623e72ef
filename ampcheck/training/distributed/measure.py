"""Run a training loop on every rank at once, and merge the records of the ranks; tensors are not gathered."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.core.arguments import parse_integer
from ampcheck.core.environment import environment
from ampcheck.core.run import Coverage
from ampcheck.health import TensorHealth, Unmeasured, health_of
from ampcheck.health.values import values_of
from ampcheck.torchtools.source import hookable
from ampcheck.torchtools.storage import holds_first_copy, is_pending, placements
from ampcheck.training.distributed.collectives import CollectiveMode
from ampcheck.training.distributed.ranks import gather, rank
from ampcheck.training.distributed.ranks import world_size as group_size
from ampcheck.training.distributed.sums import DistributedStats, RankState, compare_sums
from ampcheck.training.lineage import Lineage
from ampcheck.training.loop import LoopShadow, StepError, TrainingLoop
from ampcheck.training.reductions.norms import NormStats
from ampcheck.training.reductions.sums import ReductionWatch, SumStats

_SETTINGS = (
    "float32 matmul precision",
    "TF32 in matmul",
    "TF32 in cuDNN",
    "float16 reduced-precision reduction",
    "bfloat16 reduced-precision reduction",
    "default dtype",
)


@dataclass(frozen=True, slots=True)
class LocalHealth:
    """The health of the part of a tensor on this rank; of a shard only where no other rank counts its elements."""

    health: TensorHealth
    sharded: bool


@dataclass(slots=True)
class _RankRecord:
    """What one rank measured. state: `RankState` by role and dtype."""

    raised: list[str] = field(default_factory=list)
    autocast: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    state: list[RankState] = field(default_factory=list)
    sums: list[SumStats] = field(default_factory=list)
    norms: list[NormStats] = field(default_factory=list)


def measure_distributed(loop: TrainingLoop, steps: int = 2, *, world_size: int | None = None) -> DistributedStats:
    """Take some steps of a loop on every rank, and measure the sums over ranks and the differences between ranks. The
    state of the loop is restored.

    Every rank must call it, each with its own loop, after the process group was set up. world_size: the number of
    processes that the loop is meant for, at which 16-bit sums are predicted. All ranks get the same stats.

    Raises `UsageError` for steps or a world_size that are no positive whole numbers.
    """
    parse_integer(steps, "steps")
    target = None if world_size is None else parse_integer(world_size, "world_size", 2)
    if group_size() < 2:
        return DistributedStats(loop.name, skipped="one process alone: start it with torchrun, and set up its group")
    mine = _RankRecord(settings={name: str(v) for name, v in environment("cpu").items() if name in _SETTINGS})
    states: dict[str, set[str]] = defaultdict(set)
    gradients: dict[str, LocalHealth | Unmeasured] = {}
    collectives, shadow = CollectiveMode(), LoopShadow(judge=False)
    reductions = ReductionWatch(shadow)
    lineage = Lineage(reductions)
    lineage.begin(())
    taken = 0
    with loop.preserved(), _measured_gradients(loop, gradients), _recorded_forwards(loop, states, collectives):
        for number in range(steps):
            with shadow, lineage, collectives:
                outcome = loop.take(number)
            taken += 1
            if isinstance(outcome, StepError) and outcome.rank in (None, rank()):
                mine.raised.append(outcome.message)
            if any(gather(bool(mine.raised))):  # who has raised takes part in no further collective of the loop
                break
        mine.state = _state(loop)
        mine.sums, mine.norms = list(reductions.sums.values()), reductions.norms.totals
        if not loop.optimizers:
            gradients.update(local_health(_gradients(loop)))
        merged = merge_health(gradients)
    mine.autocast = {name: ", ".join(sorted(seen)) for name, seen in states.items()}
    ranks = gather(mine)
    sums = compare_sums(gather(collectives.calls), target)
    modules = [name for name in states if all(name in record.autocast for record in ranks)]
    seen = {
        "ranks": len(ranks),
        "steps": taken,
        "sums over ranks": sum(record.calls for record in sums),
        "gradients": len(merged),
        "modules": len(modules),
        "other collectives": sum(collectives.others.values()),
    }
    unseen = Counter(health.reason for health in gradients.values() if isinstance(health, Unmeasured))
    return DistributedStats(
        loop.name,
        len(ranks),
        taken,
        raised=tuple(error for record in ranks for error in record.raised),
        gradients=merged,
        state=tuple(state for record in ranks for state in record.state),
        collectives=tuple(sums),
        sums=tuple(stats for record in ranks for stats in record.sums),
        norms=_merged_norms([record.norms for record in ranks]),
        autocast=_differences(modules, [record.autocast for record in ranks]),
        modules=len(modules),
        settings=_differences(_SETTINGS, [record.settings for record in ranks]),
        scaled=any(scaler.is_enabled() for scaler in loop.reached.scalers.values()),
        target=target,
        coverage=Coverage(seen, dict(unseen)),
    )


def local_health(tensors: Mapping[str, torch.Tensor]) -> dict[str, LocalHealth | Unmeasured]:
    """The health of the part of each tensor on this rank; a DTensor that is still to be summed cannot be measured."""
    records: dict[str, LocalHealth | Unmeasured] = {}
    pending = Unmeasured("its addends are still to be summed over processes")
    for name, tensor in tensors.items():
        health = pending if is_pending(tensor) else health_of(tensor, histogram=True)
        sharded = bool(placements(tensor))
        if isinstance(health, Unmeasured):
            records[name] = health
        elif not sharded or holds_first_copy(tensor):
            records[name] = LocalHealth(health, sharded)
    return records


def merge_health(records: Mapping[str, LocalHealth | Unmeasured]) -> dict[str, TensorHealth]:
    """The health of whole tensors, each element counted once.

    A tensor without placements counts by the first rank that has it, as DDP replicates parameters and pipeline stages
    own theirs. Every process must call it.
    """
    merged: dict[str, TensorHealth] = {}
    for of_rank in gather({name: record for name, record in records.items() if isinstance(record, LocalHealth)}):
        for name, record in of_rank.items():
            if name not in merged:
                merged[name] = record.health
            elif record.sharded:
                merged[name] += record.health
    return merged


def _state(loop: TrainingLoop) -> list[RankState]:
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for resident in loop.residents():
        values = values_of(resident.tensor)
        size = 0 if isinstance(values, Unmeasured) else values.numel() * values.element_size()
        sizes[str(resident.role), str(resident.tensor.dtype).removeprefix("torch.")].append(size)
    return [RankState(rank(), *key, len(own), sum(own)) for key, own in sizes.items()]


def _differences(names: Sequence[str], ranks: list[dict[str, str]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """The names of which the ranks have different values, and which ranks have which."""
    ranks_of: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in names}
    for name, by_value in ranks_of.items():
        for number, record in enumerate(ranks):
            value = record.get(name, "None")
            by_value[value] = (*by_value.get(value, ()), number)
    return {name: by_value for name, by_value in ranks_of.items() if len(by_value) > 1}


def _merged_norms(ranks: list[list[NormStats]]) -> tuple[NormStats, ...]:
    """Total norms; where each rank knows a part of the exact one, the parts are combined."""
    merged = list(ranks[0])
    same = len(set(map(len, ranks))) == 1
    for number, first in enumerate(merged):
        if first.sharded:
            parts = [record[number].exact for record in ranks] if same else [None]
            known = [part for part in parts if part is not None]
            whole = sum(part**first.order for part in known) ** (1 / first.order) if len(known) == len(parts) else None
            merged[number] = replace(first, exact=whole)
    return tuple(merged)


def _gradients(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.detach() for name, parameter in loop.parameters() if parameter.grad is not None}


@contextmanager
def _measured_gradients(loop: TrainingLoop, records: dict[str, LocalHealth | Unmeasured]) -> Iterator[None]:
    """Measure gradients when an optimizer steps, since a loop may drop them right after."""

    def measure(*_: object) -> None:
        with _disable_current_modes():
            records.update(local_health(_gradients(loop)))

    with ExitStack() as hooks:
        for optimizer in loop.optimizers.values():
            hooks.callback(optimizer.register_step_pre_hook(measure).remove)
        yield


@contextmanager
def _recorded_forwards(loop: TrainingLoop, states: dict[str, set[str]], collectives: CollectiveMode) -> Iterator[None]:
    """Record the autocast state of each module at its forward, and count the forwards that run."""
    device = loop.device_type

    def enter(name: str, *_: object) -> None:
        collectives.inside += 1
        enabled = torch.is_autocast_enabled(device)
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        states[name].add(f"on in {dtype}" if enabled else "off")

    def leave(*_: object) -> None:
        collectives.inside = max(collectives.inside - 1, 0)

    with ExitStack() as hooks:
        for path, module in loop.reached.modules.items():
            for name, part in hookable(module):
                full = f"{path}.{name}" if name else path
                hooks.callback(part.register_forward_pre_hook(partial(enter, full)).remove)
                hooks.callback(part.register_forward_hook(leave, always_call=True).remove)
        yield
