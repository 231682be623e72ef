"""The numbers that live across steps: what optimizers and schedulers go by, and what the code keeps for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ampcheck.torchtools.closures import children
from ampcheck.training.loop import TrainingLoop

_Exact = Callable[[torch.Tensor], float]


def numbers_of_optimizers(loop: TrainingLoop, exact: _Exact) -> dict[str, float]:
    """Learning rates (`optimizer.param_groups.0.lr`) and the state of schedulers (`scheduler.best`).

    exact: gives the exact value of a tensor of one element.
    """
    options = (
        (f"{path}.param_groups.{number}.lr", group.get("lr"))
        for path, optimizer in loop.optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
    )
    state = (part for path, scheduler in loop.reached.schedulers.items() for part in children(scheduler, path))
    return dict(_numbers((*options, *state), exact))


def numbers_of_code(loop: TrainingLoop, exact: _Exact) -> dict[str, float]:
    """The numbers in the containers, closures and objects of the user's classes that the step reaches, by path."""
    names: dict[int, str] = {}
    numbers: dict[str, float] = {}
    for holder in loop.reached.holders:
        parts: list[tuple[str, Any]] = [] if isinstance(holder, type) else children(holder, names.get(id(holder), ""))
        for path, part in parts:
            if isinstance(part, tuple):
                parts += children(part, path)
            names.setdefault(id(part), path)
        for path, number in _numbers(parts, exact):
            numbers[path if path not in numbers else f"{path}#{len(numbers)}"] = number
    return numbers


def _numbers(parts: Iterable[tuple[str, object]], exact: _Exact) -> Iterator[tuple[str, float]]:
    for path, part in parts:
        if isinstance(part, (int, float)) and not isinstance(part, bool):
            yield path.lstrip("."), float(part)
        elif isinstance(part, torch.Tensor) and part.numel() == 1 and part.is_floating_point():
            yield path.lstrip("."), exact(part.detach())
