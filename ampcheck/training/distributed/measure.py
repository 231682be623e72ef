"""Run a training loop on every rank at once, and merge the records of the ranks; tensors are not gathered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ampcheck.core.arguments import parse_integer
from ampcheck.core.environment import environment
from ampcheck.core.run import Coverage
from ampcheck.records.protocol import StepError
from ampcheck.records.reductions import DistributedStats, NormStats, SumStats
from ampcheck.torchtools.source import hookable
from ampcheck.training.distributed.collectives import CollectiveWatch
from ampcheck.training.distributed.ranks import gather, rank
from ampcheck.training.distributed.ranks import world_size as group_size
from ampcheck.training.distributed.sums import compare_sums
from ampcheck.training.lineage import Lineage
from ampcheck.training.loop import LoopShadow, TrainingLoop
from ampcheck.training.reductions.sums import ReductionWatch

_SETTINGS = (
    "float32 matmul precision",
    "TF32 in matmul",
    "TF32 in cuDNN",
    "float16 reduced-precision reduction",
    "bfloat16 reduced-precision reduction",
    "default dtype",
)


@dataclass(slots=True)
class _RankRecord:
    """Measurements of one rank."""

    raised: list[str] = field(default_factory=list)
    autocast: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
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
    collectives, shadow = CollectiveWatch(), LoopShadow(judge=False)
    reductions = ReductionWatch(shadow)
    lineage = Lineage(reductions)
    lineage.begin(())
    taken = 0
    with loop.preserved(), _recorded_forwards(loop, states, collectives):
        for number in range(steps):
            with shadow, lineage, collectives:
                outcome = loop.take(number)
            taken += 1
            if isinstance(outcome, StepError) and outcome.rank in (None, rank()):
                mine.raised.append(outcome.message)
            if any(gather(bool(mine.raised))):  # who has raised takes part in no further collective of the loop
                break
        mine.sums, mine.norms = list(reductions.sums.values()), reductions.norms.totals
    mine.autocast = {name: ", ".join(sorted(seen)) for name, seen in states.items()}
    ranks = gather(mine)
    sums = compare_sums(gather(collectives.calls), target)
    modules = [name for name in states if all(name in record.autocast for record in ranks)]
    seen = {
        "ranks": len(ranks),
        "steps": taken,
        "sums over ranks": sum(record.calls for record in sums),
        "modules": len(modules),
        "other collectives": sum(collectives.others.values()),
    }
    return DistributedStats(
        loop.name,
        len(ranks),
        taken,
        raised=tuple(error for record in ranks for error in record.raised),
        collectives=tuple(sums),
        sums=tuple(stats for record in ranks for stats in record.sums),
        norms=_merged_norms([record.norms for record in ranks]),
        autocast=_differences(modules, [record.autocast for record in ranks]),
        modules=len(modules),
        settings=_differences(_SETTINGS, [record.settings for record in ranks]),
        scaled=any(scaler.is_enabled() for scaler in loop.reached.scalers.values()),
        target=target,
        coverage=Coverage(seen),
    )


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


@contextmanager
def _recorded_forwards(loop: TrainingLoop, states: dict[str, set[str]], collectives: CollectiveWatch) -> Iterator[None]:
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
