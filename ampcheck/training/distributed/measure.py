"""Run a training loop on every rank at once, and put together what each of them saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage
from ampcheck.health import Unmeasured
from ampcheck.health.values import values_of
from ampcheck.torchtools.source import hookable
from ampcheck.training.distributed.collectives import CollectiveWatch
from ampcheck.training.distributed.ranks import (
    MergedRecords,
    by_value,
    gather,
    measure_here,
    merge_across_ranks,
    on_first,
    rank,
)
from ampcheck.training.distributed.ranks import world_size as how_many
from ampcheck.training.distributed.stats import DistributedStats, RankResidency
from ampcheck.training.distributed.sums import put_together
from ampcheck.training.loop import StepError, TrainingLoop
from ampcheck.training.reductions.norms import NormStats
from ampcheck.training.reductions.sums import ReductionWatch

_SWITCHES = (
    "float32 matmul precision",
    "TF32 in matmul",
    "TF32 in cuDNN",
    "float16 reduced-precision reduction",
    "bfloat16 reduced-precision reduction",
    "default dtype",
)


def measure_distributed(loop: TrainingLoop, steps: int = 2, *, world_size: int | None = None) -> DistributedStats:
    """Take some steps of a loop on every rank, and measure what the ranks do together. The loop is then as it was.

    Every rank must call it, each with its own loop, after the process group was set up. world_size: the number of
    processes that the loop is meant for, at which 16-bit sums are predicted. All ranks get the same stats.

    Raises `UsageError` for steps or a world_size that are no positive whole numbers.
    """
    for name, value, least in (("steps", steps, 1), ("world_size", 2 if world_size is None else world_size, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name} must be a whole number, {least} or more; found {value!r}")
    if how_many() < 2:
        return DistributedStats(loop.name, skipped="one process alone: start it with torchrun, and set up its group")
    errors: list[StepError] = []
    states: dict[str, set[str]] = {}
    residency: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    collectives, watch = CollectiveWatch(), ReductionWatch()
    taken = 0
    with loop.preserved(), _gradients(loop) as gradients, _forwards(loop, states, collectives):
        for number in range(steps):
            with collectives, watch:
                outcome = loop.take(number)
            taken += 1
            if isinstance(outcome, StepError) and outcome.rank in (None, rank()):
                errors.append(outcome)
            if any(gather(bool(errors))):  # who has raised takes part in no further collective of the loop
                break
        for resident in loop.residents():
            place = str(resident.role), str(resident.tensor.dtype).removeprefix("torch.")
            residency[place] += 1
            sizes[place] += _local_bytes(resident.tensor)
        told = {
            "raised": [(rank(), one.step, one.message) for one in errors],
            "states": {name: ", ".join(sorted(found)) for name, found in states.items()},
            "switches": {name: str(value) for name, value in environment("cpu").items() if name in _SWITCHES},
            "residency": [RankResidency(rank(), *place, n, sizes[place]) for place, n in residency.items()],
            "sums": watch.sums(),
            "norms": watch.norms(),
        }
        merged = gradients()
    ranks = gather(told)
    found = on_first(collectives.calls, lambda calls: put_together(calls, world_size))
    modules = [name for name in states if all(name in one["states"] for one in ranks)]
    unseen = dict(Counter(merged.unmeasured.values()))
    seen = {
        "ranks": len(ranks),
        "steps": taken,
        "sums over ranks": sum(one.calls for one in found),
        "gradients": len(merged.records),
        "modules": len(modules),
        "other collectives": sum(collectives.others.values()),
    }
    return DistributedStats(
        loop.name,
        len(ranks),
        str(dist.get_backend()),
        taken,
        raised=tuple(error for one in ranks for error in one["raised"]),
        gradients=merged.records,
        differing=merged.differing,
        residency=tuple(one for each in ranks for one in each["residency"]),
        collectives=tuple(found),
        sums=tuple(one for each in ranks for one in each["sums"]),
        norms=_norms([one["norms"] for one in ranks]),
        autocast=_differences(modules, [one["states"] for one in ranks]),
        modules=len(modules),
        switches=_differences(list(_SWITCHES), [one["switches"] for one in ranks]),
        scaled=any(scaler.is_enabled() for scaler in loop.reached.scalers.values()),
        target=world_size,
        coverage=Coverage(seen, unseen),
    )


def _local_bytes(tensor: torch.Tensor) -> int:
    local = values_of(tensor)
    return 0 if isinstance(local, Unmeasured) else local.numel() * local.element_size()


def _differences(names: list[str], ranks: list[Mapping[str, str]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Of which names the ranks have different values, and which."""
    found = {name: by_value([one.get(name) for one in ranks]) for name in names}
    return {name: values for name, values in found.items() if len(values) > 1}


def _norms(ranks: list[list[NormStats]]) -> tuple[NormStats, ...]:
    """Total norms; where each rank knows a part of the exact one, the parts are put together."""
    told: list[NormStats] = []
    same = len({len(one) for one in ranks}) == 1
    for place, first in enumerate(ranks[0]):
        if first.sharded and same:
            parts = [one[place].exact for one in ranks]
            known = [part for part in parts if part is not None]
            whole = sum(part**first.order for part in known) ** (1 / first.order) if len(known) == len(parts) else None
            told.append(replace(first, exact=whole))
        else:
            told.append(replace(first, exact=None) if first.sharded else first)
    return tuple(told)


@contextmanager
def _gradients(loop: TrainingLoop) -> Iterator[Callable[[], MergedRecords[Any]]]:
    """What an optimizer is given: measured when it steps, as a loop may drop its gradients right after."""
    found: dict[str, Any] = {}
    unmeasured: dict[str, str] = {}

    def note(*_: Any) -> None:
        with _disable_current_modes():
            given = {name: p.grad.detach() for name, p in loop.parameters() if p.grad is not None}
            here, reasons = measure_here(given)
        found.update(here)
        unmeasured.update(reasons)

    with ExitStack() as hooks:
        for optimizer in loop.optimizers.values():
            hooks.callback(optimizer.register_step_pre_hook(note).remove)

        def merged() -> MergedRecords[Any]:
            if not loop.optimizers:
                note()
            merged = merge_across_ranks(found)
            return MergedRecords(merged.records, merged.differing, unmeasured)

        yield merged


@contextmanager
def _forwards(loop: TrainingLoop, states: dict[str, set[str]], watch: CollectiveWatch) -> Iterator[None]:
    """Note the autocast state of each module at its forward, and tell the watch that a forward runs."""
    device = loop.device_type

    def hook(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            watch.inside += 1
            enabled = torch.is_autocast_enabled(device)
            dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            states.setdefault(name, set()).add(f"on in {dtype}" if enabled else "off")

        return note

    def leave(*_: Any) -> None:
        watch.inside = max(watch.inside - 1, 0)

    with ExitStack() as hooks:
        for path, module in loop.reached.modules.items():
            for name, part in hookable(module):
                full = f"{path}.{name}" if name else path
                hooks.callback(part.register_forward_pre_hook(hook(full)).remove)
                hooks.callback(part.register_forward_hook(leave, always_call=True).remove)
        yield


__all__ = ["measure_distributed"]
