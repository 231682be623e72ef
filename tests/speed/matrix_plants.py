"""A workload whose steps say how long they take, for tests of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from simulated import SimulatedClock, taking

from ampcheck.core.subject import Subject
from ampcheck.speed.matrix import measure_matrix
from ampcheck.speed.matrix.stats import WorkloadStats
from ampcheck.speed.steps import Way

SECONDS = {
    "eager, float32": 0.010,
    "eager, bfloat16": 0.008,
    "default, float32": 0.005,
    "default, bfloat16": 0.016,
    "max-autotune, float32": 0.0101,
}


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@dataclass
class Planted:
    """A workload whose steps say how long they take; compiled ones make a graph, unless `hollow`."""

    seconds: Mapping[str, float] = field(default_factory=lambda: SECONDS)
    raising: tuple[str, ...] = ()
    hollow: bool = False
    name: str = "planted"
    trains: bool | None = False
    optimizer: Any = None
    built: list[str] = field(default_factory=list)

    def subject(self, size: str) -> Subject:
        return Subject((torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),)))

    def step(self, way: Way, *, device: str, size: str) -> Callable[[], float]:
        self.built.append(str(way))
        if str(way) in self.raising:
            raise ValueError("no such kernel")
        step = taking(self.seconds[str(way)])
        if way.mode != "eager" and not self.hollow:
            code = plus_one.__code__.replace(co_name=f"plus_one_{len(self.built)}")  # what is compiled is kept by code
            torch.compile(FunctionType(code, globals()), backend="eager")(torch.ones(1))
        return step


def measured(
    planted: Planted,
    modes: tuple[str, ...] = ("eager", "default"),
    precisions: tuple[str, ...] = ("float32",),
    noise: float = 0.005,
    budget: float = 3.0,
    memory: bool = False,
) -> WorkloadStats:
    stats = measure_matrix(
        [planted], modes=modes, precisions=precisions, budget=budget, accuracy=False, memory=memory,
        clock=SimulatedClock(noise),
    )  # fmt: skip
    return stats.workloads[0]
