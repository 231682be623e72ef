"""A training loop: its parts, the tensors that live across its steps, how its steps run, and under which shadow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from ampcheck.core.arguments import is_number, parse_integer
from ampcheck.core.errors import as_result, brief, message_of, require_ran
from ampcheck.core.run import Where
from ampcheck.core.subject import Subject
from ampcheck.facts.memory import has_companions
from ampcheck.records.protocol import StepError
from ampcheck.records.state import Role
from ampcheck.shadow import Shadow
from ampcheck.shadow.explain import trail_of
from ampcheck.stream.ops import OpEvent
from ampcheck.torchtools.batches import Playback
from ampcheck.torchtools.modes import aside
from ampcheck.torchtools.private import READ_NUMBER, without_modes
from ampcheck.torchtools.reachable import Reached, own_tensors, reach
from ampcheck.torchtools.snapshot import Snapshot, preserved
from ampcheck.torchtools.source import scaler_method, users_place
from ampcheck.torchtools.storage import device_of, local, storage_number

STEPS = 24
"""Steps that are observed. A scaler that starts at 65536 needs up to 16 to find its scale."""

_OF_OPTIMIZERS = ("state", "param_groups", "defaults")
"""Attributes that every optimizer has."""

_Owned: TypeAlias = "tuple[Role, str, object]"
"""Object that may be a tensor that lives across steps, with its purpose and its path."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A tensor that lives across steps. `name` is its path: `blocks.0.weight`, `blocks.0.weight.exp_avg`, `ema`.

    A COPY belongs to a module or a collection that no optimizer steps (an EMA, a frozen teacher); OTHER are tensors of
    the step itself (accumulators, also the data in its closure).
    """

    role: Role
    name: str
    tensor: torch.Tensor


def ended_by(error: BaseException, step: int) -> StepError:
    """The step that an exception of the user's code ended."""
    of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    kind = "memory" if of_memory or "can't allocate memory" in message_of(error) else "raised"
    return StepError(step, kind, brief(error), *users_place(error), op=scaler_method(error))


class TrainingLoop:
    """`step(i) -> float` and the objects that it trains.

    The mapping of a training subject names the parts: `model` (or several), `optimizer` (one or a list), `scaler`,
    `step`; anything else that lives across steps (`ema`, `scheduler`, `teacher`). Other objects that the step reaches
    (its closure, the objects of the user's classes) belong to it as well. Optional: `steps`, how many steps are
    observed; `save() -> checkpoint` and `load(checkpoint)`, by which the loop is interrupted and resumed; `policy`, see
    `DtypePolicy`; `world_size`, how many processes it is meant for; `horizon`, how many steps are planned; `data`, an
    iterable of batches, of which `step(batch)` takes one: see `batches.played`.

    Raises `UsageError` for `steps` or a `horizon` that are no number of steps.
    """

    RESERVED = ("step", "data", "steps", "save", "load", "policy", "run", "world_size", "horizon")

    def __init__(self, subject: Subject) -> None:
        shape: Mapping[str, Any] = subject.shape
        self.subject = subject
        self.name = subject.name
        self.shape = shape
        self.step = shape["step"]
        self.settled: Callable[[float | StepError], float | StepError] = lambda taken: taken
        """Applied to the result of each step: ranks that step together agree on errors."""
        self.save, self.load = shape.get("save"), shape.get("load")
        parts = {str(key): value for key, value in shape.items() if key not in self.RESERVED}
        step = self.step.step if isinstance(self.step, Playback) else self.step
        self._roots: dict[str, Any] = {**parts, "step": step, "save": self.save, "load": self.load}
        self.reached = reach(self._roots)
        self.horizon: int | None = shape.get("horizon")
        for key in ("steps", "horizon"):
            if shape.get(key) is not None:
                parse_integer(shape[key], f"{key} of {self.name}")

    @property
    def batches(self) -> int:
        """Number of batches of `data` that are played, over and over; 0 where the steps find their data themselves."""
        return len(self.step.batches) if isinstance(self.step, Playback) else 0

    @property
    def empty(self) -> bool:
        """True if there is no module, optimizer or tensor that the step could change."""
        return not (self.reached.modules or self.reached.optimizers or self.reached.tensors)

    @property
    def sharded(self) -> bool:
        """True if FSDP2 shards a module."""
        kinds = (kind.__name__ for _, module in self.modules() for kind in type(module).__mro__)
        return "FSDPModule" in kinds

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By path; the same object appears once."""
        return self.reached.optimizers

    @property
    def scalers(self) -> dict[str, Any]:
        """Those that are enabled, by path."""
        return {path: scaler for path, scaler in self.reached.scalers.items() if scaler.is_enabled()}

    @property
    def device_type(self) -> str:
        """Where the parameters are; `cpu` without any."""
        return next((device_of(p).type for _, p in self.parameters()), "cpu")

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of the modules, and others that the optimizers step, each once by its path.

        Of the only module, or of the one called `model`, the path has no prefix.
        """
        named: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for path, module in self.reached.modules.items():
            prefix = self.path(path, "")
            for name, parameter in module.named_parameters():
                named.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter))
        for path, optimizer in self.reached.optimizers.items():
            for number, parameter in enumerate(parameters_of(optimizer)):
                named.setdefault(id(parameter), (f"{path}.params.{number}", parameter))
        return iter(named.values())

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every module by its path, each once."""
        seen: set[int] = set()
        for path, module in self.reached.modules.items():
            for name, part in module.named_modules():
                if id(part) not in seen:
                    seen.add(id(part))
                    yield self.path(path, name), part

    def path(self, root: str, name: str) -> str:
        """The path of the part `name` of the module at `root`."""
        if root == "model" or len(self.reached.modules) == 1:
            return name
        return f"{root}.{name}" if name else root

    def reach_again(self) -> None:
        """Follow the parts as they are now: `load` may have built a new model, optimizer or scaler."""
        self.reached = reach(self._roots)

    def residents(self) -> list[Resident]:
        """The tensors that live across steps, each once; optimizer state is created by the first step."""
        reached = reach(self._roots, within=False)  # a step may have replaced the contents of a closure
        optimizers = reached.optimizers.values()
        stepped = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
        owned = (
            *self._weights(stepped, bool(optimizers)),
            *self._optimizer_state(reached),
            *self._contents(reached, stepped),
        )
        residents: dict[int, Resident] = {}
        for role, name, tensor in owned:
            if isinstance(tensor, torch.Tensor):
                residents.setdefault(id(tensor), Resident(role, name, tensor))
        named = {str(key) for key in self.shape}
        memory = {_memory(resident.tensor) for resident in residents.values()}
        for path, tensor in reached.tensors.items():
            if _memory(tensor) not in memory:  # a state_dict() holds the same tensors once more
                role = Role.COPY if path.partition(".")[0] in named else Role.OTHER
                residents.setdefault(id(tensor), Resident(role, path, tensor))
        return list(residents.values())

    def _weights(self, stepped: Collection[int], optimized: bool) -> list[_Owned]:
        """Parameters and their gradients. stepped: ids of those that an optimizer steps, if the loop is `optimized`."""
        weights: list[_Owned] = []
        parameters = list(self.parameters())
        for name, parameter in parameters:
            trained = id(parameter) in stepped or (not optimized and parameter.requires_grad)
            weights.append((Role.PARAMETER if trained else Role.COPY, name, parameter))
        return weights + [(Role.GRADIENT, f"{name}.grad", parameter.grad) for name, parameter in parameters]

    def _optimizer_state(self, reached: Reached) -> Iterator[_Owned]:
        names = {id(parameter): name for name, parameter in self.parameters()}
        for path, optimizer in reached.optimizers.items():
            held = [(names.get(id(owned), "?"), state) for owned, state in optimizer.state.items()]
            # An attribute may be a list of master weights.
            held += [(f"{path}.{key}", value) for key, value in vars(optimizer).items() if key not in _OF_OPTIMIZERS]
            for prefix, value in held:
                yield from [(Role.STATE, name, tensor) for name, tensor in _contained(value, prefix)]

    def _contents(self, reached: Reached, stepped: set[int]) -> Iterator[_Owned]:
        """Yield what modules and scalers hold."""
        for path, module in reached.modules.items():
            own = [id(parameter) for parameter in module.parameters()]
            trained = not own or not stepped or not stepped.isdisjoint(own)
            for name, buffer in module.named_buffers():
                yield Role.BUFFER if trained else Role.COPY, self.path(path, name), buffer
            for name, attribute in own_tensors(module):
                yield Role.OTHER, self.path(path, name), attribute
        for path, scaler in reached.scalers.items():
            for key in ("scale", "growth_tracker"):
                yield Role.SCALER, f"{path}.{key}", getattr(scaler, f"_{key}", None)

    def preserved(self) -> AbstractContextManager[Snapshot]:
        """Restore the loop on leaving, also after an exception: model, optimizer, scaler, the rest."""
        return preserved(self.reached)

    def take(self, number: int) -> float | StepError:
        """Run one step. An exception of the step is a result: it is returned as a `StepError`."""
        return self.settled(self._take(number))

    def _take(self, number: int) -> float | StepError:
        try:
            value = require_ran(self.step(number), f"step({number}) of {self.name}")
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; the run reports it
            return ended_by(as_result(error), number)
        if hasattr(value, "item") and hasattr(value, "shape") and math.prod(value.shape) == 1:
            with suppress(RuntimeError, TypeError):  # one on meta has no value
                value = value.item()
        if not is_number(value):
            shown = f"{value!r:.40}"
            if hasattr(value, "shape"):
                shown = f"{type(value).__name__} of shape {tuple(value.shape)}"
            return StepError(number, "value", f"step({number}) returned {shown}")
        return float(value)


def _contained(value: object, path: str, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value and in its mappings and sequences, by path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple, deque)) and depth:
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _contained(part, f"{path}.{key}", depth - 1)


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor on this process, dense and real, detached."""
    tensor = local(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same values in the same memory."""
    number = storage_number(tensor) if tensor.layout is torch.strided else None
    if number is None:
        return (id(tensor),)
    return number, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def inner_optimizer(value: object) -> Any:
    """The optimizer that makes the steps, inside the wrappers of a library (Accelerate, Lightning)."""
    while not hasattr(value, "_optimizer_step_pre_hooks") and hasattr(value, "optimizer"):
        value = value.optimizer
    return value


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """The parameters in the groups of an optimizer."""
    return chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))


class LoopShadow(Shadow):
    """A shadow that keeps the exact values of numbers that leave the run.

    numbers: the last ones, with their exact values. steps: it is entered for each step; what is left at the end of
    one, such as gradients that the next one discards, is no result.
    """

    def __init__(self, *, judge: bool = True, steps: bool = False) -> None:
        super().__init__(judge=judge)
        self._steps_alone = steps
        self.numbers: list[tuple[float, float]] = []
        self.degrees: Any = None

    def see(self, event: OpEvent) -> Any:
        """Follow an op, and keep the exact value of a number that leaves the run."""
        out = super().see(event)
        if self.degrees is not None and self.degrees.scales.used and out is not NotImplemented:
            with without_modes(), torch.inference_mode(False), torch.no_grad():
                self.degrees.see(event, out)
        if event.op is READ_NUMBER and has_companions(event.args[0]) and type(out) is float:
            self.numbers.append((out, float(self.exact(event.args[0]))))
        return out

    def _escaped(self, tensor: torch.Tensor, shared: bool) -> None:
        super()._escaped(tensor, shared)
        if self.degrees is not None:
            self.degrees.escaped(tensor, shared)

    def _left(self) -> None:
        if not self._steps_alone:
            self.reach_ends()

    def accept(self, tensor: torch.Tensor) -> None:
        """Let a tensor, which may be a part of its memory, go on with the values that it really has."""
        if has_companions(tensor) and self.store.known(tensor) is not None:
            with aside():
                self.store.lift(tensor.detach())


def first_nonfinite(shadow: Shadow, values: Iterable[torch.Tensor | None]) -> Where | None:
    """Where an infinity or a NaN in one of these tensors came from, also where its inputs had lost digits before."""
    for value in values:
        if value is not None and has_companions(value) and not bool(value.detach().isfinite().all()):
            steps = trail_of(shadow, value.detach())
            place = next((step.where for step in steps if step.error == torch.inf), None)
            if place is not None:
                return place
    return None
