"""A training loop as it is handed over: what is in it, what lives in it across steps, and how it is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ampcheck.core.errors import UsageError, as_result, brief, message_of, require_ran
from ampcheck.core.subject import Kind, Subject
from ampcheck.torchtools.reachable import Reached, reach
from ampcheck.torchtools.snapshot import Snapshot, preserved
from ampcheck.torchtools.source import users_place

_OUT_OF_MEMORY: type[Exception] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
"""PyTorch before 2.5 knows the one of CUDA alone."""


class Role(str, Enum):
    """What a tensor that lives across steps is for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    BUFFER = "buffer"
    COPY = "copy"
    SCALER = "scaler"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Resident:
    """A tensor that lives across steps. `name` is its path: `blocks.0.weight`, `blocks.0.weight.exp_avg`, `ema`.

    A COPY belongs to a module or a collection that no optimizer steps (an EMA, a frozen teacher); OTHER are tensors of
    the step's own (accumulators, also the data that a closure holds).
    """

    role: Role
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepError:
    """A step that did not come to its end. `kind`: `raised`, `memory` (out of memory) or `value` (no float).

    The exception itself is not kept: its traceback holds every local of the step, tensors and graphs among them.
    rank: of another process, in which it was so; None where it was in this one.
    """

    step: int
    kind: str
    message: str
    file: str = ""
    line: int | None = None
    rank: int | None = None


class TrainingLoop:
    """`step(i) -> float` with what it trains.

    The mapping of a training subject names the parts: `model` (or several), `optimizer` (one or a list), `scaler`,
    `step`; anything else that lives across steps (`ema`, `scheduler`, `teacher`). What the step reaches besides (its
    closure, the objects of the user's classes) is found as well. Optional: `steps`, how many steps are observed;
    `save() -> checkpoint` and `load(checkpoint)`, by which the loop is interrupted and resumed; `policy`, see
    `ResidencyPolicy`; `world_size`, how many processes it is meant for.

    Raises `UsageError` for another subject and for `steps` that are no number of steps.
    """

    RESERVED = ("step", "steps", "save", "load", "policy", "run", "world_size")

    def __init__(self, subject: Subject) -> None:
        if subject.kind is not Kind.TRAINING:
            raise UsageError(
                f"{subject.name} is of kind '{subject.kind.value}'; a training loop is a mapping with 'step'"
            )
        shape: Mapping[str, Any] = subject.shape
        self.subject = subject
        self.name = subject.name
        self.shape = shape
        self.step = shape["step"]
        self.settled: Callable[[float | StepError], float | StepError] = lambda taken: taken
        """Through which the result of each step goes: ranks that step together agree in it on errors."""
        self.save, self.load = shape.get("save"), shape.get("load")
        roots = {str(key): value for key, value in shape.items() if key not in self.RESERVED}
        self._roots: dict[str, Any] = {**roots, "step": self.step, "save": self.save, "load": self.load}
        self.reached = reach(self._roots)
        given = shape.get("steps")
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise UsageError(f"steps of {self.name} must be a whole number, 1 or more; found {given!r}")

    @property
    def empty(self) -> bool:
        """Whether there is no module, optimizer or tensor that the step could change."""
        return not (self.reached.modules or self.reached.optimizers or self.reached.tensors)

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds a module: its buffers for gathered weights keep the format of the first step that ran."""
        kinds = (kind.__name__ for _, module in self.modules() for kind in type(module).__mro__)
        return "FSDPModule" in kinds

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By path; the same object appears once."""
        return self.reached.optimizers

    @property
    def device_type(self) -> str:
        """Where the parameters are; `cpu` without any."""
        return next((p.device.type for _, p in self.parameters()), "cpu")

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of the modules, and what else the optimizers step, each once by its path.

        Of the only module, or of the one called `model`, the path has no prefix.
        """
        seen: set[int] = set()
        for path, module in self.reached.modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self.path(path, name), parameter
        for path, optimizer in self.optimizers.items():
            stepped: list[torch.nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
            for number, parameter in enumerate(stepped):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{path}.params.{number}", parameter

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every module by its path, each once."""
        seen: set[int] = set()
        for path, module in self.reached.modules.items():
            for name, part in module.named_modules():
                if id(part) not in seen:
                    seen.add(id(part))
                    yield self.path(path, name), part

    def path(self, root: str, name: str) -> str:
        """What the part `name` of the module at `root` is called."""
        if root == "model" or len(self.reached.modules) == 1:
            return name
        return f"{root}.{name}" if name else root

    def residents(self) -> list[Resident]:
        """The tensors that live across steps, as they are now, each once; optimizer state comes with its first step."""
        again = reach(self._roots, within=False)  # a step may have replaced what a closure holds
        found: dict[int, Resident] = {}

        def add(role: Role, name: str, tensor: Any) -> None:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in found:
                found[id(tensor)] = Resident(role, name, tensor)

        stepped = {id(p) for o in again.optimizers.values() for group in o.param_groups for p in group["params"]}
        names: dict[int, str] = {}
        for name, parameter in self.parameters():
            names[id(parameter)] = name
            trained = id(parameter) in stepped or (not again.optimizers and parameter.requires_grad)
            add(Role.PARAMETER if trained else Role.COPY, name, parameter)
        for name, parameter in self.parameters():
            add(Role.GRADIENT, f"{name}.grad", parameter.grad)
        for optimizer in again.optimizers.values():
            for stepped_one, state in optimizer.state.items():
                owner = names.get(id(stepped_one), "?")
                for key, value in state.items() if isinstance(state, dict) else ():
                    add(Role.STATE, f"{owner}.{key}", value)
        for path, module in again.modules.items():
            trained = any(id(p) in stepped for p in module.parameters()) or not list(module.parameters())
            for name, buffer in module.named_buffers():
                add(Role.BUFFER if trained or not stepped else Role.COPY, self.path(path, name), buffer)
        for path, scaler in again.scalers.items():
            for key in ("_scale", "_growth_tracker"):
                add(Role.SCALER, f"{path}.{key.strip('_')}", getattr(scaler, key, None))
        named = {str(key) for key in self.shape}
        for path, tensor in again.tensors.items():
            add(Role.COPY if path.partition(".")[0] in named else Role.OTHER, path, tensor)
        return list(found.values())

    def snapshot(self) -> Snapshot:
        """Everything that the step can reach now, to be put back later."""
        return Snapshot(reach(self._roots))

    @contextmanager
    def preserved(self) -> Iterator[Snapshot]:
        """The loop is afterwards as it was before, also after an exception: model, optimizer, scaler, the rest."""
        with preserved(self.reached) as snapshot:
            yield snapshot

    def take(self, number: int) -> float | StepError:
        """Run one step. What it raises is evidence, not ours to raise: it comes back as a `StepError`."""
        return self.settled(self._take(number))

    def _take(self, number: int) -> float | StepError:
        try:
            value = require_ran(self.step(number), f"step({number}) of {self.name}")
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; the run reports it
            as_result(error)
            file, line = users_place(error)
            memory = isinstance(error, (MemoryError, _OUT_OF_MEMORY)) or "can't allocate memory" in message_of(error)
            return StepError(number, "memory" if memory else "raised", brief(error), file, line)
        if hasattr(value, "item") and hasattr(value, "shape") and math.prod(value.shape) == 1:
            with suppress(RuntimeError, TypeError):  # one on meta has no value
                value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            what = (
                f"{type(value).__name__} of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"{value!r:.40}"
            )
            return StepError(number, "value", f"step({number}) returned {what}")
        return float(value)


def same_loss(one: float, other: float) -> bool:
    """Whether two runs of one step gave the same value, NaN for NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


__all__ = ["Reached", "Resident", "Role", "Snapshot", "StepError", "TrainingLoop", "same_loss"]
