"""Sampled measurement of the optimizer steps of a user's own loop: gradients, updates and the loss scale."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ampcheck.core.errors import UsageError
from ampcheck.facts.memory import dtype_name
from ampcheck.health import PendingHealth, Unmeasured, measure_health
from ampcheck.health.plan import Plan
from ampcheck.stream.calls import method_of, steps_of
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.storage import device_of, local
from ampcheck.training.loop import inner_optimizer
from ampcheck.training.monitor.calls import CallRecord
from ampcheck.training.monitor.sums import (
    GradientSum,
    GradientSums,
    MonitorStats,
    OptimizerStats,
    ParameterStats,
    Series,
)
from ampcheck.training.monitor.updates import Entry, Updates, is_compensated, rounds_to_nearest
from ampcheck.training.protocol.optimizer_gradients import gradients_of
from ampcheck.training.protocol.recorder import Recorder

_CULPRITS = 16
"""Skipped steps of an optimizer whose gradients are looked at: later ones give the same names."""

Follower = Callable[[int, float | None], None]
"""Called with the number of a measured step, skipped ones counted, and the loss scale, None without a scaler."""


@dataclass(slots=True)
class _Steps:
    """The steps of one optimizer. stepped: whether it was stepped in the current `scaler.step`. attempts, nonfinite: as
    of `OptimizerStats`."""

    name: str
    optimizer: torch.optim.Optimizer
    taken: int = 0
    measured: int = 0
    number: int = 0
    stepped: bool = False
    guarded: bool = False
    rates: Series = field(default_factory=Series)
    skips: Series = field(default_factory=Series)
    attempts: array[int] = field(default_factory=lambda: array("q"))
    nonfinite: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def stats(self, bad: Mapping[str, int]) -> OptimizerStats:
        """The record. Waits for the device. bad: in how many measured steps a gradient was not finite, by parameter."""
        skipped = tuple(number for number, found_inf in enumerate(self.skips.read()) if found_inf)
        taken, nonfinite = self.taken, self.nonfinite
        if self.guarded:  # the device alone knew of each step that it was skipped
            taken -= len(skipped)
            nonfinite = {n: tuple(p for p, count in bad.items() if i < count) for i, n in enumerate(skipped)}
        nearest, attempts = rounds_to_nearest(self.optimizer), tuple(self.attempts)
        counts = taken, self.measured, self.rates.read()
        return OptimizerStats(self.name, *counts, attempts, skipped, nonfinite, self.guarded, nearest)


class TrainingMonitor:
    """Records what optimizers do inside `watching`, each N-th step of an optimizer measured, the first among them.

    names: of parameters, by their `id`. scaler: whose scale is recorded, in every step. recorder: see `CallRecord`. The
    loop computes the same bits as without, and nothing is read from a device before `read`, but for the first steps,
    whose calls are recorded, and those for which the scaler itself waited since it skipped them.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any,
        names: Mapping[int, str],
        *,
        every: int = 1,
        recorder: Recorder | None = None,
    ) -> None:
        self.every, self.scaler = every, scaler
        many = len(optimizers) > 1
        self._steps = [
            _Steps(f"optimizer.{i}" if many else "optimizer", optimizer) for i, optimizer in enumerate(optimizers)
        ]
        self._names, self._keys = dict(names), dict[int, int]()
        self._parameters: list[ParameterStats] = []
        self._alive: dict[int, tuple[_Steps, torch.Tensor]] = {}  # by the number of the parameter, inside the block
        self._gradients: dict[tuple[torch.device, str, Plan], GradientSums] = {}
        self._scales, self._losses = Series(), Series()
        self._unseen: Counter[str] = Counter()
        self._updates = Updates(self._unseen)
        self._followers: list[Follower] = []
        known = scaler is None or isinstance(scaler, torch.amp.GradScaler)  # of others no calls can be recorded
        named = {steps.name: steps.optimizer for steps in self._steps}
        self._calls = CallRecord(named, scaler, self._names, recorder) if known else None

    def follow(self, follower: Follower) -> None:
        """Call `follower` after each measured step of the first optimizer."""
        self._followers.append(follower)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what runs inside; all hooks are removed afterwards, also after an exception."""
        with ExitStack() as stack:
            stack.callback(self._leave)
            for steps in self._steps:
                stack.enter_context(steps_of(steps.optimizer, partial(self._step, steps)))
            if self.scaler is not None:
                for name, subscriber in (("step", self._scaler_step), ("update", self._scaler_update)):
                    stack.enter_context(method_of(type(self.scaler), name, subscriber))
            if self._calls is not None:
                stack.enter_context(self._calls.recording())
            yield

    def step(self, loss: torch.Tensor | float) -> None:
        """Record the loss of a step. Raises `UsageError` for a tensor of several elements."""
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise UsageError(f"a loss must be one number; found a tensor of shape {tuple(loss.shape)}")
        with _apart():
            self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def _leave(self) -> None:
        self._compare()
        self._alive.clear()
        self._keys.clear()
        self._updates.forget()

    def _compare(self) -> None:
        """Compare parameters with their first values and with the optimizers' state, while they are referenced."""
        with _apart():
            still = self._updates.still({key: tensor for key, (_, tensor) in self._alive.items()})
            for key, (steps, tensor) in self._alive.items():
                compensated = is_compensated(steps.optimizer, tensor)
                self._parameters[key] = replace(self._parameters[key], still=still.get(key), compensated=compensated)

    def _key(self, steps: _Steps, tensor: torch.Tensor) -> int:
        key = self._keys.get(id(tensor))
        if key is None:
            key = self._keys[id(tensor)] = len(self._parameters)
            name = self._names.get(id(tensor), f"{steps.name}.params.{key}")
            dtype = dtype_name(tensor.dtype)
            self._parameters.append(ParameterStats(name, steps.name, dtype, tensor.numel(), vector=tensor.dim() < 2))
            self._alive[key] = steps, tensor
        return key

    def _step(self, steps: _Steps, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> Iterator[None]:
        steps.stepped = True
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            steps.guarded = True
            with _apart():
                self._note_attempt(steps, found_inf)
        measured = steps.taken % self.every == 0
        closure = any(map(callable, (*args, *kwargs.values())))
        yield from self._measured(steps, closure, found_inf) if measured else (None,)
        steps.measured, steps.taken = steps.measured + measured, steps.taken + 1
        self._ended(steps)
        if measured and steps is self._steps[0] and self._followers:
            with _apart():
                scale = None if (current := self._scale()) is None else float(current)
            for follower in self._followers:
                follower(steps.number - 1, scale)

    def _measured(self, steps: _Steps, closure: bool, found_inf: torch.Tensor | None) -> Iterator[None]:
        """Measure a step. closure: it computes the gradients itself, which are there only after it."""
        with _apart():
            entries = self._entries(steps, closure, found_inf)
            if not closure:
                self._measure_gradients(steps, entries)
        yield
        with _apart():
            if closure:
                for entry in entries:
                    entry.gradient = entry.parameter.grad
                self._measure_gradients(steps, entries)
            for entry in entries:
                if entry.group is not None:
                    entry.state = steps.optimizer.state.get(entry.parameter, {})
            self._updates.add(entries)

    def _ended(self, steps: _Steps) -> None:
        steps.number += 1
        if self._calls is not None:
            self._calls.ended()

    def _entries(self, steps: _Steps, closure: bool, found_inf: torch.Tensor | None) -> list[Entry]:
        entries = []
        known = rounds_to_nearest(steps.optimizer)
        for number, group in enumerate(steps.optimizer.param_groups):
            rate = group.get("lr")
            alive: torch.Tensor | bool = True if rate is None else rate != 0
            if found_inf is not None:
                alive = (found_inf == 0) & alive
            if number == 0 and isinstance(rate, (int, float, torch.Tensor)):
                steps.rates.append(rate)
            for parameter in group["params"]:
                key = self._key(steps, parameter)
                moves = (parameter.grad is not None or closure) and parameter.requires_grad
                before = local(parameter).clone() if moves else None
                entries.append(Entry(key, parameter, before, parameter.grad, alive, None if known else group))
        return entries

    def _measure_gradients(self, steps: _Steps, entries: Sequence[Entry]) -> None:
        scale = self._scale()
        grad_scale = getattr(steps.optimizer, "grad_scale", None)  # the gradients of a fused step are still scaled
        groups: dict[tuple[torch.device, str, Plan], tuple[list[int], list[PendingHealth]]] = {}
        for entry in entries:
            gradient = entry.gradient
            if gradient is None:
                continue
            if gradient.layout is torch.sparse_coo:
                gradient = gradient.coalesce()  # of a gradient on a device this waits for it
            if grad_scale is not None:
                gradient = gradient / grad_scale.to(gradient.device, non_blocking=True)
            health = measure_health(gradient, histogram=True)
            if isinstance(health, Unmeasured):
                self._unseen[f"gradients that were {health}"] += 1
                continue
            keys, pending = groups.setdefault((device_of(local(gradient)), health.dtype, health.plan), ([], []))
            keys.append(entry.key)
            pending.append(health)
        for group, (keys, pending) in groups.items():
            device, dtype, plan = group
            if group not in self._gradients:
                self._gradients[group] = GradientSums(plan, dtype, device)
            self._gradients[group].add(keys, pending, steps.number, 1.0 if scale is None else scale)

    def _scale(self) -> torch.Tensor | None:
        """The loss scale on its device; `get_scale()` would wait for it."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        scale: torch.Tensor | None = getattr(self.scaler, "_scale", None)
        return scale

    def _scaler_step(self, scaler: Any, optimizer: Any, *_: object, **__: object) -> Iterator[None]:
        known = scaler is self.scaler and scaler.is_enabled()
        steps = next((steps for steps in self._steps if known and steps.optimizer is inner_optimizer(optimizer)), None)
        if steps is None:
            return
        if not steps.attempts and not len(self._scales):
            self._note_scale()
        steps.stepped = False
        before = len(steps.attempts)
        yield
        if len(steps.attempts) == before:  # an optimizer that does not skip by itself
            self._note_attempt(steps, 0.0 if steps.stepped else 1.0)
        if not steps.stepped:
            if len(steps.nonfinite) < _CULPRITS:
                with _apart():
                    bad = (p for p, grad in gradients_of(steps.optimizer) if not bool(grad.isfinite().all()))
                    names = tuple(self._parameters[self._key(steps, parameter)].name for parameter in bad)
                steps.nonfinite[len(steps.attempts) - 1] = names
            self._ended(steps)

    def _scaler_update(self, scaler: Any, *_: object, **__: object) -> Iterator[None]:
        if scaler is not self.scaler or not scaler.is_enabled():
            return
        if not len(self._scales):
            self._note_scale()
        yield
        self._note_scale()

    def _note_attempt(self, steps: _Steps, skipped: torch.Tensor | float) -> None:
        steps.skips.append(skipped)
        steps.attempts.append(max(len(self._scales) - 1, 0))

    def _note_scale(self) -> None:
        if (scale := self._scale()) is not None:
            with _apart():
                self._scales.append(scale)

    def read(self, subject: str) -> MonitorStats:
        """The statistics so far. Waits for the device."""
        gradients: dict[int, GradientSum] = {}
        for group in self._gradients.values():
            for key, gradient in group.read().items():
                gradients[key] = gradients[key] + gradient if key in gradients else gradient
        updates = self._updates.read(self._parameters)
        self._compare()
        bad: dict[str, dict[str, int]] = {steps.name: {} for steps in self._steps}
        for key, gradient in gradients.items():
            bad[self._parameters[key].optimizer][self._parameters[key].name] = gradient.bad
        return MonitorStats(
            subject,
            self.every,
            tuple(steps.stats(bad[steps.name]) for steps in self._steps),
            tuple(
                replace(parameter, gradient=gradients.get(key), update=updates.get(key))
                for key, parameter in enumerate(self._parameters)
            ),
            None if self.scaler is None else bool(self.scaler.is_enabled()),
            self._scales.read(),
            self._losses.read(),
            unseen=dict(self._unseen),
            calls=None if self._calls is None else self._calls.read(subject),
        )


@contextmanager
def _apart() -> Iterator[None]:
    """Our own ops, of which neither autograd nor a mode that watches the user's knows."""
    with torch.no_grad(), without_modes():
        yield


def sort_objects(objects: Sequence[object]) -> tuple[Any, list[torch.optim.Optimizer], Any]:
    """The model, the optimizers and the scaler among the objects of a watch. Raises `UsageError` for others, and for
    too many."""
    models, optimizers, scalers = list[Any](), list[Any](), list[Any]()
    for item in (given for given in objects if given is not None):
        parts = item if isinstance(item, (list, tuple)) and item else (item,)
        if all(hasattr(part, "param_groups") and hasattr(part, "step") for part in parts):
            optimizers += parts
        elif all(hasattr(item, method) for method in ("step", "update", "is_enabled")):
            scalers.append(item)
        elif callable(item):
            models.append(item)
        else:
            raise UsageError(
                "watch takes a module or function, optimizers and a torch.amp.GradScaler; found "
                f"{'an empty list' if item == [] else type(item).__name__}"
            )
    if len(models) > 1 or len(scalers) > 1:
        raise UsageError(f"watch takes one model and one scaler; found {len(models)} models and {len(scalers)} scalers")
    if scalers and not optimizers:
        raise UsageError("a scaler is judged by the steps of an optimizer: pass the optimizer to watch(...) as well")
    unwrapped = {id(optimizer): optimizer for optimizer in map(_unwrapped, optimizers)}
    return next(iter(models), None), list(unwrapped.values()), next(iter(scalers), None)


def _unwrapped(value: object) -> torch.optim.Optimizer:
    optimizer = inner_optimizer(value)
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UsageError(f"what steps the weights must be a torch.optim.Optimizer; found {type(value).__name__}")
    return optimizer
