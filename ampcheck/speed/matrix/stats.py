"""Figures of a matrix of modes and precisions, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.speed.paired import Step
from ampcheck.speed.steps import Optimizer, StepConfig, step_of


@dataclass(slots=True)
class Workload:
    """A model to time. make: the model and its inputs. trains: whether a step goes backward; None where the
    model says so itself, by its mode. optimizer: makes one from parameters. scaler: whether a GradScaler scales the
    loss. size: of several workloads of one name."""

    name: str
    make: Callable[[], Subject]
    trains: bool | None = None
    optimizer: Optimizer | None = None
    scaler: bool = False
    size: str = ""

    def step(self, config: StepConfig, device: str) -> Step:
        """One step, of a model of its own."""
        return step_of(
            self.make(), config, device=device, backward=self.trains, optimizer=self.optimizer, scaler=self.scaler
        )


def workload_of(value: object) -> Workload:
    """A workload, or that of a user's subject. Raises `UsageError` for a subject that takes no mode or precision."""
    if isinstance(value, Workload):
        return value
    subject = as_subject(value)
    if subject.kind in (Kind.TRAINING, Kind.CALL):
        raise UsageError(
            f"{subject.name} runs by itself, so no mode or precision can be chosen for it: pass a module and its args"
        )
    return Workload(subject.name, lambda: subject)
