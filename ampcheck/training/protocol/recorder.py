"""Record the calls of a training loop: scaler, optimizers, clipping, schedulers, backward passes and checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ampcheck.facts.memory import dtype_name
from ampcheck.numerics.losses import computed_in, factor_of
from ampcheck.records.protocol import Act, Event, StepError
from ampcheck.stream.calls import subscribed
from ampcheck.torchtools.patching import attribute
from ampcheck.torchtools.private import backward_task
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import AMPCHECK, users_line
from ampcheck.torchtools.storage import is_transformed
from ampcheck.training.loop import TrainingLoop, inner_optimizer, parameters_of
from ampcheck.training.protocol.arguments import are_own, dtype_of, limit_of, states_in
from ampcheck.training.protocol.optimizer_gradients import (
    AssignedGradients,
    found_inf,
    gradients_of,
    versions_of,
)

_SEARCHED = 500
"""Autograd nodes behind a loss that are searched for the multiplication by the scale, which is near the end."""

_Call: TypeAlias = Generator[None, Any, None]
_Scaler: TypeAlias = torch.amp.GradScaler
_Optimizer: TypeAlias = torch.optim.Optimizer


class Recorder:
    """Record the calls of a loop as `events`; `step` is the number that they carry.

    overflow_from: the first gradient that a scaler looks at in or after this step is made infinite, so that it skips
    the step, as it does when its scale has grown too far; `overflowed` is that step. after_backward: make it infinite
    as soon as a scaled loss has run backward, where no scaler looks at gradients.
    low: the 16-bit dtypes in which autocast ran since the last backward pass.
    on_look: is called with the number of the step where a backward pass begins or ends, and a scaler or a step begins.
    scaled: whether the loop has asked for the scale of an enabled scaler, through any of its methods. on_backward: is
    called before each backward pass with the tensors that it starts from, and their loss scale, None for none.
    """

    def __init__(self, loop: TrainingLoop, *, overflow_from: int | None = None, after_backward: bool = False) -> None:
        self.events: list[Event] = []
        self.step = 0
        self._loop = loop
        self.overflowed: int | None = None
        self.scaled = False
        self._read: float | None = None  # the last scale that the loop itself has read
        self.on_backward: Callable[[object, float | None], None] | None = None
        self.on_look: Callable[..., None] | None = None
        self._overflow_from, self._after_backward = overflow_from, after_backward
        self._parameters: dict[int, str] = {}
        self._paths: dict[int, tuple[object, str]] = {}
        self._optimizers: dict[str, _Optimizer] = {}
        self.name_parts()
        self._scalings: dict[object, tuple[str, float]] = {}
        self._inside_scaler = self._scaling = self.asks = False
        self._assigned = AssignedGradients()
        self.low: tuple[str, ...] = ()
        self._unpacks = False

    def name_parts(self) -> None:
        """Name parameters, optimizers, scalers and schedulers as the loop does; parts that have a name keep it."""
        loop = self._loop
        self._parameters = {id(parameter): name for name, parameter in loop.parameters()}
        optimizers = [(path, inner_optimizer(optimizer)) for path, optimizer in loop.optimizers.items()]
        for path, part in (*optimizers, *loop.reached.scalers.items(), *loop.reached.schedulers.items()):
            if id(part) not in self._paths:
                self._paths[id(part)] = part, self._numbered(path)
        for _, optimizer in optimizers:
            self._optimizers.setdefault(self._paths[id(optimizer)][1], optimizer)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter, as the loop names it."""
        return self._parameters.get(id(parameter), "?")

    def renamed(self, parts: Mapping[str, object]) -> Iterator[Event]:
        """The events so far, with these names of optimizers and scalers."""
        names = {self._paths[id(part)][1]: name for name, part in parts.items() if id(part) in self._paths}
        for event in self.events:
            of, cleared = ([names.get(path, path) for path in paths] for paths in (event.optimizers, event.cleared))
            who = names.get(event.who, event.who)
            yield replace(event, who=who, optimizers=tuple(of), cleared=tuple(cleared))

    def listening(self) -> AbstractContextManager[None]:
        """Record everything inside."""
        return subscribed(
            optimizer_step=self._optimizer_step,
            optimizer_load=self._load_optimizer,
            backward=self._backward,
            saved_hooks_entered=self._enter_hooks,
            region_entered=self._enter_autocast,
            scaler_get_scale=self._get_scale,
            scaler_scale=self._scale,
            scaler_unscale=self._unscale,
            scaler_step=self._scaler_step,
            scaler_update=self._update,
            scaler_state_dict=partial(self._state, Act.SAVE),
            scaler_load_state_dict=partial(self._state, Act.LOAD),
            scheduler_step=self._schedule,
            clip=self._clip,
            save=self._save,
        )

    def run(
        self, steps: int, around: Callable[[int], AbstractContextManager[object]] | None = None
    ) -> Iterator[float | StepError]:
        """Run the first steps of the loop, each inside `around(number)`, and yield what each returns, or its error."""
        for self.step in range(steps):
            with nullcontext() if around is None else around(self.step):
                taken = self._loop.take(self.step)
            self.forget_graphs()
            yield taken

    def forget_graphs(self) -> None:
        """Let go of the graphs of scaled losses, after a step."""
        self._scalings.clear()

    def _add(self, act: Act, **facts: Any) -> None:
        file, line = users_line(sys._getframe(2))
        self.events.append(Event(act, self.step, file=file, line=line, **facts))

    def _look(self, optimizer: _Optimizer | None = None, *, in_pass: bool = False) -> None:
        if self.on_look is not None:
            self.on_look(self.step, optimizer, in_pass=in_pass)

    def _path(self, part: Any, kind: str) -> str:
        """The path of a scaler, optimizer or scheduler; of one created by a step the path of its kind, numbered."""
        part = inner_optimizer(part) if kind == "optimizer" else part
        if id(part) not in self._paths:
            first = next((path for known, path in self._paths.values() if type(known) is type(part)), kind)
            path = self._numbered(first.partition("#")[0])
            self._paths[id(part)] = part, path
            if kind == "optimizer":
                self._optimizers[path] = part
        return self._paths[id(part)][1]

    def _numbered(self, path: str) -> str:
        """A path that no other part has, such as an earlier scaler of the same variable."""
        taken, number = {known for _, known in self._paths.values()}, 2
        while f"{path}#{number}" in taken:
            number += 1
        return f"{path}#{number}" if path in taken else path

    def _of(self, scaler: _Scaler) -> dict[str, Any]:
        scale = self._scale_of(scaler)
        return {"who": self._path(scaler, "scaler"), "scale": scale, "enabled": scaler.is_enabled()}

    def _scale_of(self, scaler: _Scaler) -> float:
        read = self._read
        with self._asking():
            scale: float = scaler.get_scale()
        self._read = read
        return scale

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Mark the calls inside as no part of the user's run."""
        self.asks = True
        try:
            yield
        finally:
            self.asks = False

    def _get_scale(self, scaler: _Scaler) -> _Call:
        scale = yield
        if scaler.is_enabled():
            self.scaled, self._read = True, scale

    def _scale(self, scaler: _Scaler, outputs: object) -> _Call:
        result = yield
        facts = self._of(scaler)
        if scaler.is_enabled():
            self._scaling = True
            for _, tensor in tensors(result):
                if tensor.grad_fn is not None:
                    self._scalings.setdefault(tensor.grad_fn, (facts["who"], facts["scale"]))
        self._add(Act.SCALE, dtype=dtype_of(outputs), **facts)

    def _unscale(self, scaler: _Scaler, optimizer: _Optimizer) -> None:
        self._overflow(optimizer, scaler.is_enabled())
        if not self._inside_scaler:
            self._look()
            name = self._path(optimizer, "optimizer")
            cleared = (name,) if self._assigned.since_step(name, optimizer) else ()
            facts = {"optimizers": (name,), "cleared": cleared, "half": self._half(optimizer), **self._of(scaler)}
            self._add(Act.UNSCALE, **facts)

    def _scaler_step(self, scaler: _Scaler, optimizer: _Optimizer, *_: object, **__: object) -> _Call:
        self._overflow(optimizer, scaler.is_enabled())
        self._look()
        name = self._path(optimizer, "optimizer")
        facts = {"optimizers": (name,), "half": self._half(optimizer), **self._of(scaler)}
        before, returned = len(self.events), False
        try:
            with attribute(self, "_inside_scaler", True):
                yield
            returned = True
        finally:
            skipped = returned and scaler.is_enabled()
            if skipped:
                found = found_inf(scaler, optimizer)
                stepped = any(e.act is Act.OPTIMIZER_STEP and e.who == name for e in self.events[before:])
                skipped = not stepped if found is None else found
            bad = self._nonfinite(optimizer) if skipped else ()
            self._add(Act.SCALER_STEP, skipped=skipped, nonfinite=bad, **facts)
            self._assigned.stepped(name, optimizer)

    def _update(self, scaler: _Scaler, *_: object, **__: object) -> _Call:
        facts = self._of(scaler)
        yield
        self._add(Act.UPDATE, new_scale=self._scale_of(scaler), **facts)

    def _state(self, act: Act, scaler: _Scaler, *_: object, **__: object) -> _Call:
        yield
        self._add(act, **self._of(scaler))

    def _optimizer_step(self, optimizer: _Optimizer, *args: object, **options: object) -> None:
        inside = self._inside_scaler
        self._look(optimizer)
        self._add(
            Act.OPTIMIZER_STEP,
            who=self._path(optimizer, "optimizer"),
            through_scaler=inside,
            closure=any(map(callable, (*args, options.get("closure")))),
            half=self._half(optimizer),
            nonfinite=() if inside or not self._scaling else self._nonfinite(optimizer),
            gradients=any(parameter.grad is not None for parameter in parameters_of(optimizer)),
        )

    def _load_optimizer(self, optimizer: _Optimizer, *_: object, **__: object) -> _Call:
        yield
        self._add(Act.LOAD, optimizers=(self._path(optimizer, "optimizer"),))

    def _schedule(self, scheduler: LRScheduler, *_: object, **__: object) -> _Call:
        begins = getattr(scheduler, "last_epoch", None) == 0
        yield
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_code.co_filename.startswith(AMPCHECK):
            caller = caller.f_back
        nested = caller is not None and caller.f_code.co_filename == lr_scheduler.__file__
        nested = nested or isinstance(scheduler, ReduceLROnPlateau)  # it follows a metric, not the steps
        if not nested and (optimizer := getattr(scheduler, "optimizer", None)) is not None:
            of = (self._path(optimizer, "optimizer"),)
            self._add(Act.SCHEDULER_STEP, who=self._path(scheduler, "scheduler"), begins=begins, optimizers=of)

    def _backward(self, t_outputs: object, *args: object, **kwargs: object) -> _Call:
        if is_transformed():  # its values may not be looked at
            return self._add(Act.GRAD)
        if backward_task() != -1:  # a checkpoint's own, inside another
            return
        scaled, who, scale = self._scaling_of(t_outputs)
        with self._asking():
            own_gradients = bool(args) and are_own(args[0])
        facts: dict[str, Any] = {
            "scaled": None if own_gradients and not scaled else scaled,
            "who": who,
            "scale": scale,
            "dtype": "" if own_gradients else dtype_of(t_outputs),
            "create_graph": len(args) > 2 and args[2] is True,
        }
        if not kwargs.get("accumulate_grad", False):
            yield
            self._add(Act.GRAD, **facts)
            return
        if self.on_backward is not None and not own_gradients:
            self.on_backward(t_outputs, scale)
        self._look(in_pass=True)
        before = {name: versions_of(optimizer) for name, optimizer in self._optimizers.items()}
        with self._asking():
            facts["cleared"] = tuple(
                name for name, o in self._optimizers.items() if not any(bool(grad.any()) for _, grad in gradients_of(o))
            )
        outputs = [] if own_gradients else [tensor for _, tensor in tensors(t_outputs)]
        facts["computed"] = tuple(dict.fromkeys(dtype_name(d) for tensor in outputs for d in computed_in(tensor)))
        facts["factor"] = 1.0 if self._unpacks else max(map(factor_of, outputs), default=1.0)
        yield
        self._look()
        touched = tuple(name for name, o in self._optimizers.items() if versions_of(o) != before[name])
        for name in touched if self._after_backward else ():
            self._overflow(self._optimizers[name], bool(scaled))
        facts["low"], self.low = self.low, ()
        self._add(Act.BACKWARD, optimizers=touched, **facts)

    def _scaling_of(self, outputs: object) -> tuple[bool | None, str, float | None]:
        """Return whether a scaler multiplied a loss, which one, and by what; None where several did, or out of
        sight."""
        nodes = [root.grad_fn for _, root in tensors(outputs)] if self._scalings else []
        waiting = [node for node in nodes if node is not None]
        seen: set[object] = set()
        scalings: dict[tuple[str, float], None] = {}
        while waiting and len(seen) < _SEARCHED:
            node = waiting.pop(0)
            if node in seen:
                continue
            seen.add(node)
            if (scaling := self._scalings.get(node)) is not None:
                scalings[scaling] = None
            else:
                waiting += [following for following, _ in node.next_functions if following is not None]
        if scalings:
            return (True, *next(iter(scalings))) if len(scalings) == 1 else (None, "", None)
        return (None if waiting else False), "", None

    def _enter_autocast(self, region: torch.autocast) -> None:
        dtype = getattr(region, "fast_dtype", None)
        on = getattr(region, "_enabled", False) and torch.is_grad_enabled()  # an evaluation has no gradients
        if on and isinstance(dtype, torch.dtype) and dtype.itemsize == 2:
            self.low = tuple(dict.fromkeys((*self.low, dtype_name(dtype))))

    def _enter_hooks(self, _: object) -> None:
        self._unpacks = True  # reading what a node saved would run the user's hooks, as those of a checkpoint

    def _clip(self, parameters: torch.Tensor | Iterable[torch.Tensor], *args: object, **kwargs: object) -> None:
        known = {id(p) for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        optimizers = (name for name, o in self._optimizers.items() if any(id(p) in known for p in parameters_of(o)))
        self._add(Act.CLIP, optimizers=tuple(optimizers), limit=limit_of(args, kwargs), scale=self._read)

    def _save(self, obj: object, *_: object, **__: object) -> None:
        if keys := tuple(states_in(obj)):
            self._add(Act.CHECKPOINT, keys=keys)

    def _overflow(self, optimizer: _Optimizer, enabled: bool) -> None:
        """Make a gradient infinite, in the step in which this was requested."""
        if self._overflow_from is None or self.step < self._overflow_from or self.overflowed is not None or not enabled:
            return
        for _, grad in gradients_of(optimizer):
            if grad.numel():
                with torch.no_grad():
                    grad[(0,) * grad.dim()] = float("inf")
                self.overflowed = self.step
                return

    def _half(self, optimizer: _Optimizer) -> tuple[str, ...]:
        trained = (parameter for parameter in parameters_of(optimizer) if parameter.requires_grad)
        return tuple(self._parameters.get(id(p), "?") for p in trained if p.dtype is torch.float16)

    def _nonfinite(self, optimizer: _Optimizer) -> tuple[str, ...]:
        with self._asking():
            bad = [parameter for parameter, grad in gradients_of(optimizer) if not bool(grad.isfinite().all())]
        return tuple(self._parameters.get(id(parameter), "?") for parameter in bad)
