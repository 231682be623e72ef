"""The numbers that live across steps: what optimizers and schedulers go by, and what the code keeps for itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType
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


def counts_of_optimizers(loop: TrainingLoop, exact: _Exact) -> dict[str, float]:
    """The numbers in the options and the state of optimizers (`optimizer.param_groups.0.t`, `optimizer.state.0.step`),
    learning rates aside."""
    parts = [
        (f"{path}.{place}.{key}", value)
        for path, optimizer in loop.optimizers.items()
        for place, options in (
            *((f"param_groups.{number}", group) for number, group in enumerate(optimizer.param_groups)),
            *((f"state.{number}", state) for number, state in enumerate(optimizer.state.values())),
        )
        for key, value in (options.items() if isinstance(options, dict) else ())
        if key != "lr"
    ]
    return dict(_numbers(parts, exact))


def numbers_of_code(loop: TrainingLoop, exact: _Exact) -> dict[str, float]:
    """The numbers in the containers, closures and objects of the user's classes that the step reaches, by path."""
    return {path: number for path, number, _ in _of_code(loop, exact)}


def set_numbers_of_code(loop: TrainingLoop, numbers: Mapping[str, float]) -> None:
    """Write numbers to the paths under which `numbers_of_code` finds them; those in a tuple stay."""
    with torch.no_grad():
        for path, _, write in list(_of_code(loop, float)):
            if path in numbers:
                write(numbers[path])


def _of_code(loop: TrainingLoop, exact: _Exact) -> Iterator[tuple[str, float, Callable[[float], None]]]:
    """Each number that the code keeps: its path, its value, and a function that writes another in its place."""
    names: dict[int, str] = {}
    known: set[str] = set()
    for holder in loop.reached.holders:
        prefix = names.get(id(holder), "")
        parts: list[tuple[str, Any]] = [] if isinstance(holder, type) else children(holder, prefix)
        for path, part in parts:
            if isinstance(part, tuple):
                parts += children(part, path)
            names.setdefault(id(part), path)
        for place, part in parts:
            for path, number in _numbers([(place, part)], exact):
                unique = path if path not in known else f"{path}#{len(known)}"
                known.add(unique)
                yield unique, number, partial(_write, holder, prefix, place, part)


def _write(holder: Any, prefix: str, place: str, part: object, number: float) -> None:
    """Write a number in the place of `part`, which `children(holder, prefix)` found at `place`."""
    name = place[len(prefix) :].removeprefix(".")
    if isinstance(part, torch.Tensor):
        part.fill_(number)
    elif isinstance(holder, dict):
        holder.update({key: number for key in holder if str(key) == name})
    elif isinstance(holder, (list, deque)) and not name.strip("0123456789"):
        holder[int(name or 0)] = number
    elif isinstance(holder, FunctionType):
        cells = dict(zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True))
        if place in cells:
            cells[place].cell_contents = number
        elif place in holder.__globals__:
            holder.__globals__[place] = number
    elif hasattr(holder, name):  # numbers in a tuple cannot be written
        setattr(holder, name, number)


def _numbers(parts: Iterable[tuple[str, object]], exact: _Exact) -> Iterator[tuple[str, float]]:
    for path, part in parts:
        if isinstance(part, (int, float)) and not isinstance(part, bool):
            yield path.lstrip("."), float(part)
        elif isinstance(part, torch.Tensor) and part.numel() == 1 and part.is_floating_point():
            yield path.lstrip("."), exact(part.detach())
