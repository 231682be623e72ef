"""A workload whose steps say how long they take, for tests of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType

import torch
from simulated import SimulatedClock, taking

from ampcheck.core.subject import Subject
from ampcheck.records.matrix import MatrixStats
from ampcheck.speed.matrix.measure import measure_matrix
from ampcheck.speed.matrix.stats import Workload
from ampcheck.speed.steps import StepConfig

SECONDS = {
    "eager, float32": 0.010,
    "eager, bfloat16": 0.008,
    "default, float32": 0.005,
    "default, bfloat16": 0.016,
    "max-autotune, float32": 0.0101,
}


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def small() -> Subject:
    return Subject((torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),)))


@dataclass
class Planted(Workload):
    """A workload whose steps say how long they take; compiled ones make a graph, unless `hollow`."""

    name: str = "planted"
    make: Callable[[], Subject] = small
    trains: bool | None = False
    seconds: Mapping[str, float] = field(default_factory=lambda: SECONDS)
    raising: tuple[str, ...] = ()
    hollow: bool = False
    built: list[str] = field(default_factory=list)

    def step(self, config: StepConfig, device: str) -> Callable[[], float]:
        self.built.append(str(config))
        if str(config) in self.raising:
            raise ValueError("no such kernel")
        step = taking(self.seconds[str(config)])
        if config.mode != "eager" and not self.hollow:
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
) -> MatrixStats:
    return measure_matrix(
        planted, modes=modes, precisions=precisions, budget=budget, accuracy=False, memory=memory,
        clock=SimulatedClock(noise),
    )  # fmt: skip
