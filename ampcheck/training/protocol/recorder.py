"""Listen to a training loop: its scaler, optimizers, clipping, schedulers, backward passes and checkpoints."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampcheck.numerics.losses import computed_in
from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import is_users, users_line
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.protocol.events import Act, Event

_SEARCHED = 500
"""How many autograd nodes behind a loss are searched for the multiplication by the scale, which stands near the end."""

Listener = Callable[[Event, Any], None]
"""Told of each event as it happens, with the optimizer, scaler or scheduler, or the tensors of a backward pass."""


class Recorder:
    """Note what a loop does, as `events`; `step` is the number that they carry.

    listeners hear of each event at once. overflow_from: the first gradient that a scaler looks at in or after this step
    is made infinite, so that it skips the step, as it does when its scale has grown too far; `overflowed` is that step.
    after_backward: make it infinite as soon as a scaled loss has run backward, where no scaler looks at gradients.
    scaled: whether the loop has asked for the scale of an enabled scaler, through any of its methods.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        *,
        listeners: Collection[Listener] = (),
        overflow_from: int | None = None,
        after_backward: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.step = 0
        self._listeners = tuple(listeners)
        self._overflow_from, self._after_backward = overflow_from, after_backward
        self.overflowed: int | None = None
        self._parameters = {id(parameter): name for name, parameter in loop.parameters()}
        self._names: dict[int, tuple[Any, str]] = {}
        self._optimizers: dict[str, Any] = {}
        for path, thing in (*loop.optimizers.items(), *loop.reached.scalers.items(), *loop.reached.schedulers.items()):
            self._names[id(thing)] = thing, path
        self._optimizers.update(loop.optimizers)
        self._scaled: list[tuple[Any, str, float]] = []
        self._inside: Any = None
        self._scaling = False
        self.scaled = False
        self._low: dict[str, None] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear everything inside; all wrappers and hooks are gone afterwards."""
        with ExitStack() as stack:
            for kind in _with_subclasses(torch.amp.GradScaler):
                for name, make in self._of_scalers():
                    if name in vars(kind):
                        stack.enter_context(replaced(kind, name, make))
            for kind in _with_subclasses(LRScheduler):
                if "step" in vars(kind):
                    stack.enter_context(replaced(kind, "step", self._schedules))
            handle = register_optimizer_step_pre_hook(self._optimizer_steps)
            stack.callback(handle.remove)
            stack.enter_context(replaced(torch.autograd, "_engine_run_backward", self._backward))
            stack.enter_context(replaced(torch.amp.autocast_mode.autocast, "__enter__", self._enters))
            stack.enter_context(replaced(torch, "save", self._saves))
            for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
                for owner in _owners(name):
                    stack.enter_context(replaced(owner, name, self._clips))
            yield

    def _of_scalers(self) -> Iterable[tuple[str, Callable[[Any], Any]]]:
        return (
            ("get_scale", self._asks),
            ("scale", self._scales),
            ("unscale_", self._unscales),
            ("step", self._scaler_steps),
            ("update", self._updates),
            ("state_dict", functools.partial(self._state, Act.SAVE)),
            ("load_state_dict", functools.partial(self._state, Act.LOAD)),
        )

    def _add(self, act: Act, subject: Any, **facts: Any) -> None:
        file, line = users_line(sys._getframe(2))
        event = Event(act, self.step, file=file, line=line, **facts)
        self.events.append(event)
        for listener in self._listeners:
            listener(event, subject)

    def _name(self, thing: Any, kind: str) -> str:
        """The path of a thing; of one that appears in the course of the loop the path of its kind, numbered."""
        if id(thing) not in self._names:
            taken = [name for _, name in self._names.values()]
            first = next((n for held, n in self._names.values() if type(held) is type(thing)), kind)
            base, number = first.partition("#")[0], 2
            while f"{base}#{number}" in taken:
                number += 1
            name = f"{base}#{number}" if base in taken else base
            self._names[id(thing)] = thing, name
            if kind == "optimizer":
                self._optimizers[name] = thing
        return self._names[id(thing)][1]

    def _asks(self, original: Any) -> Any:
        def get_scale(scaler: Any) -> Any:
            self.scaled = self.scaled or scaler.is_enabled()
            return original(scaler)

        return get_scale

    def _scales(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            who, factor = self._name(scaler, "scaler"), scaler.get_scale()
            if scaler.is_enabled():
                self._scaling = True
                self._scaled += [(t.grad_fn, who, factor) for _, t in tensors(result) if t.grad_fn is not None]
            dtype = next((_short(t.dtype) for _, t in tensors(outputs)), "")
            self._add(Act.SCALE, scaler, who=who, scale=factor, enabled=scaler.is_enabled(), dtype=dtype)
            return result

        return scale

    def _unscales(self, original: Any) -> Any:
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            self._poison(optimizer, scaler.is_enabled())
            if self._inside is None:
                half = self._half(optimizer)
                facts = {"scale": scaler.get_scale(), "enabled": scaler.is_enabled(), "half": half}
                name = self._name(optimizer, "optimizer")
                self._add(Act.UNSCALE, scaler, who=self._name(scaler, "scaler"), optimizers=(name,), **facts)
            return original(scaler, optimizer)

        return unscale_

    def _scaler_steps(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._poison(optimizer, scaler.is_enabled())
            name = self._name(optimizer, "optimizer")
            facts = {"scale": scaler.get_scale(), "enabled": scaler.is_enabled(), "half": self._half(optimizer)}
            before, outer = len(self.events), self._inside
            self._inside = scaler
            came = False
            try:
                result = original(scaler, optimizer, *args, **kwargs)
                came = True
            finally:
                self._inside = outer
                stepped = any(e.act is Act.OPTIMIZER_STEP and e.who == name for e in self.events[before:])
                found = _found_inf(scaler, optimizer)
                skipped = came and scaler.is_enabled() and (found if found is not None else not stepped)
                bad = tuple(self._nonfinite(optimizer)) if skipped else ()
                who = self._name(scaler, "scaler")
                self._add(Act.SCALER_STEP, scaler, who=who, optimizers=(name,), skipped=skipped, nonfinite=bad, **facts)
            return result

        return step

    def _updates(self, original: Any) -> Any:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            before = scaler.get_scale()
            result = original(scaler, *args, **kwargs)
            facts = {"scale": before, "new_scale": scaler.get_scale(), "enabled": scaler.is_enabled()}
            self._add(Act.UPDATE, scaler, who=self._name(scaler, "scaler"), **facts)
            return result

        return update

    def _state(self, act: Act, original: Any) -> Any:
        def state(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            facts = {"scale": scaler.get_scale(), "enabled": scaler.is_enabled()}
            self._add(act, scaler, who=self._name(scaler, "scaler"), **facts)
            return result

        return state

    def _optimizer_steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        name = self._name(optimizer, "optimizer")
        inside = self._inside is not None
        bad = () if inside or not self._scaling else tuple(self._nonfinite(optimizer))
        half = self._half(optimizer)
        facts = {"half": half, "nonfinite": bad, "gradients": any(p.grad is not None for p in _params(optimizer))}
        self._add(Act.OPTIMIZER_STEP, optimizer, who=name, through_scaler=inside, **facts)

    def _schedules(self, original: Any) -> Any:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scheduler, *args, **kwargs)
            frame = sys._getframe(1)
            nested = frame.f_code.co_name in ("_initial_step", "__init__", "step") and not is_users(
                frame.f_code.co_filename
            )
            nested = nested or isinstance(scheduler, ReduceLROnPlateau)  # it follows a metric, not the steps
            if not nested and (optimizer := getattr(scheduler, "optimizer", None)) is not None:
                name = self._name(optimizer, "optimizer")
                who = self._name(scheduler, "scheduler")
                self._add(Act.SCHEDULER_STEP, scheduler, who=who, optimizers=(name,))
            return result

        return step

    def _backward(self, original: Any) -> Any:
        def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # a checkpoint's own, inside another
                return original(t_outputs, *args, **kwargs)
            scaled, who, scale = self._came_scaled([t for _, t in tensors(t_outputs)])
            handed = bool(args) and _is_handed(args[0])
            facts: dict[str, Any] = {
                "scaled": None if handed and not scaled else scaled,
                "who": who,
                "scale": scale,
                "dtype": "" if handed else next((_short(t.dtype) for _, t in tensors(t_outputs)), ""),
                "create_graph": len(args) > 2 and args[2] is True,
            }
            if not kwargs.get("accumulate_grad", False):
                result = original(t_outputs, *args, **kwargs)
                self._add(Act.GRAD, t_outputs, **facts)
                return result
            before = {name: self._gradients(optimizer) for name, optimizer in self._optimizers.items()}
            cleared = tuple(name for name, optimizer in self._optimizers.items() if _is_clear(optimizer))
            computed = () if handed else tuple({_short(d): None for _, t in tensors(t_outputs) for d in computed_in(t)})
            result = original(t_outputs, *args, **kwargs)
            touched = tuple(name for name, o in self._optimizers.items() if self._gradients(o) != before[name])
            for name in touched if self._after_backward else ():
                self._poison(self._optimizers[name], bool(scaled))
            low, self._low = self.low, {}
            told = {"low": low, "computed": computed, **facts}
            self._add(Act.BACKWARD, t_outputs, optimizers=touched, cleared=cleared, **told)
            return result

        return run

    def _came_scaled(self, roots: list[torch.Tensor]) -> tuple[bool | None, str, float | None]:
        """Whether a scaler multiplied a loss, which one, and by what; None where several did, or out of sight."""
        waiting = [root.grad_fn for root in roots if root.grad_fn is not None] if self._scaled else []
        seen: set[Any] = set()
        found: dict[tuple[str, float], None] = {}
        while waiting and len(seen) < _SEARCHED:
            node = waiting.pop(0)
            if node in seen:
                continue
            seen.add(node)
            if (by := next((one[1:] for one in self._scaled if one[0] is node), None)) is not None:
                found[by] = None
            else:
                waiting += [one for one, _ in node.next_functions if one is not None]
        if found:
            return (True, *next(iter(found))) if len(found) == 1 else (None, "", None)
        return (None if waiting else False), "", None

    @property
    def low(self) -> tuple[str, ...]:
        """The 16-bit dtypes in which autocast ran since the last backward pass."""
        return tuple(self._low)

    def forget_graphs(self) -> None:
        """Between steps: let go of the graphs that were kept to know a scaled loss again."""
        self._scaled.clear()

    def _enters(self, original: Any) -> Any:
        def __enter__(region: Any) -> Any:  # noqa: N807
            dtype = getattr(region, "fast_dtype", None)
            on = getattr(region, "_enabled", False) and torch.is_grad_enabled()  # an evaluation has no gradients
            if on and isinstance(dtype, torch.dtype) and dtype.itemsize == 2:
                self._low[_short(dtype)] = None
            return original(region)

        return __enter__

    def _clips(self, original: Any) -> Any:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            known = {id(one) for one in given}
            whose = tuple(name for name, o in self._optimizers.items() if any(id(p) in known for p in _params(o)))
            self._add(Act.CLIP, given, optimizers=whose)
            return original(given, *args, **kwargs)

        return clip

    def _saves(self, original: Any) -> Any:
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            if keys := tuple(_states_in(obj)):
                self._add(Act.CHECKPOINT, obj, keys=keys)
            return original(obj, *args, **kwargs)

        return save

    def _poison(self, optimizer: Any, enabled: bool) -> None:
        waiting = self._overflow_from is not None and self.step >= self._overflow_from and self.overflowed is None
        if not waiting or not enabled:
            return
        for parameter in _params(optimizer):
            if parameter.grad is not None and parameter.grad.numel():
                grad = parameter.grad
                values = grad._values() if grad.is_sparse else grad.to_local() if hasattr(grad, "to_local") else grad
                if values.numel():
                    with torch.no_grad():
                        values[(0,) * values.dim()] = float("inf")
                    self.overflowed = self.step
                    return

    def _gradients(self, optimizer: Any) -> dict[int, tuple[int, int]]:
        grads = ((id(p), p.grad) for p in _params(optimizer))
        return {number: (id(grad), grad._version) for number, grad in grads if grad is not None}

    def _half(self, optimizer: Any) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for parameter in _params(optimizer):
            if parameter.is_floating_point() and parameter.dtype.itemsize <= 2 and parameter.requires_grad:
                dtype = _short(parameter.dtype)
                found[dtype] = (*found.get(dtype, ()), self._parameters.get(id(parameter), "?"))
        return found

    def _nonfinite(self, optimizer: Any) -> Iterator[str]:
        for parameter in _params(optimizer):
            grad = parameter.grad
            if grad is not None:
                values = grad.coalesce().values() if grad.is_sparse else grad
                values = values.to_local() if hasattr(values, "to_local") else values
                if not bool(values.isfinite().all()):
                    yield self._parameters.get(id(parameter), "?")


def _params(optimizer: Any) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_clear(optimizer: Any) -> bool:
    """Whether no parameter has a gradient, or none but zeros."""
    for parameter in _params(optimizer):
        grad = parameter.grad
        if grad is not None:
            values = grad._values() if grad.is_sparse else grad.to_local() if hasattr(grad, "to_local") else grad
            if bool(values.any()):
                return False
    return True


def _is_handed(grads: Any) -> bool:
    """Whether backward starts from gradients that the step made itself, not from the 1 of a loss."""
    given = [grad for _, grad in tensors(grads)]
    return any(grad.numel() != 1 or float(grad) != 1.0 for grad in given)


def _found_inf(scaler: Any, optimizer: Any) -> bool | None:
    """What the scaler itself found. A fused optimizer is called all the same and skips inside its kernel."""
    with suppress(Exception):
        found = scaler._found_inf_per_device(optimizer)
        return bool(sum(value.item() for value in found.values())) if found else None
    return None


def _with_subclasses(kind: type) -> list[type]:
    found: list[type] = [kind]
    for one in found:
        below: list[type] = type.__subclasses__(one)
        found += [kind for kind in below if kind not in found]
    return found


def _owners(name: str) -> list[Any]:
    """Where a clipping function is looked up: PyTorch's own modules, and the user's that imported it by name."""
    original = getattr(torch.nn.utils.clip_grad, name, None)
    if original is None:
        return []
    ours = [module for module in (torch.nn.utils, torch.nn.utils.clip_grad) if vars(module).get(name) is original]
    files = ((module, getattr(module, "__file__", None)) for module in list(sys.modules.values()))
    theirs = [m for m, file in files if isinstance(file, str) and is_users(file) and vars(m).get(name) is original]
    return [*ours, *theirs]


def _states_in(content: Any, depth: int = 3) -> Iterator[str]:
    if not isinstance(content, dict) or not depth:
        return
    if {"state", "param_groups"} <= content.keys():
        yield "optimizer"
    elif {"scale", "growth_factor", "_growth_tracker"} <= content.keys():
        yield "scaler"
    else:
        for value in content.values():
            yield from _states_in(value, depth - 1)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
