"""The recorder of calls. PyTorch is hooked here, once for each kind of call, while somebody subscribes to it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ampcheck.torchtools.patching import ObservedCall, Observer, observed, observing, replaced
from ampcheck.torchtools.source import is_users

_lock = threading.RLock()


class _Kind:
    """The subscribers to one kind of call. places: the functions, each by its owner and name."""

    def __init__(self, places: Callable[[], Iterable[tuple[Any, str]]]) -> None:
        self.places = places
        self._subscribers: tuple[Observer, ...] = ()
        self._hooks, self._wrappers = ExitStack(), list[object]()
        self._threads = threading.local()

    @property
    def _running(self) -> list[Any]:
        """The first arguments of the calls that run in this thread, the outermost first."""
        calls: list[Any] = self._threads.__dict__.setdefault("calls", [])
        return calls

    @contextmanager
    def subscribed(self, subscriber: Observer) -> Iterator[None]:
        """Call `subscriber` around each call."""
        with _lock:
            self._hook()
            self._subscribers = (*self._subscribers, subscriber)
        try:
            yield
        finally:
            with _lock:
                number = self._subscribers.index(subscriber)
                self._subscribers = self._subscribers[:number] + self._subscribers[number + 1 :]
                if not self._subscribers:
                    self._hooks.close()
                    self._wrappers.clear()

    def _hook(self) -> None:
        for owner, name in self.places():  # a class may be new
            if getattr(owner, name) not in self._wrappers:
                self._hooks.enter_context(replaced(owner, name, self._make))
                self._wrappers.append(getattr(owner, name))

    def _make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        observed = observing(lambda: self._subscribers, original)

        def run(*args: Any, **kwargs: Any) -> Any:
            running = self._running
            if args and any(first is args[0] for first in running):
                return original(*args, **kwargs)  # a method that calls the one that it overrides
            running.append(args[0] if args else None)
            try:
                return observed(*map(_read, args), **{name: _read(value) for name, value in kwargs.items()})
            finally:
                running.pop()

        return run


class _Steps(_Kind):
    """The subscribers to the steps of all optimizers, or of one. registers: of the hooks before and after a step."""

    def __init__(self, *registers: Callable[[Any], RemovableHandle]) -> None:
        super().__init__(tuple)
        self._registers = registers

    def _hook(self) -> None:
        if not self._subscribers:
            self._hooks.callback(self.close_raised, ())
            for register, hook in zip(self._registers, (self._before, self._after), strict=True):
                self._hooks.callback(register(hook).remove)

    def close_raised(self, frames: Collection[FrameType]) -> None:
        """Close the steps of this thread whose frame is none of `frames`."""
        while self._running and self._running[-1][0] not in frames:
            self._running.pop()[1].close()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            frames = [frame for frame, _ in walk_stack(sys._getframe(1))]
            self.close_raised(frames)
            self._running.append((frames[0], call := ObservedCall()))
            call.begin(self._subscribers, args, kwargs)

    def _after(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            frames = [frame for frame, _ in walk_stack(sys._getframe(1))]
            self.close_raised(frames)
            if self._running and self._running[-1][0] is frames[0]:
                self._running.pop()[1].end()


def _read(value: Any) -> Any:
    """An iterator of parameters is read once for all; a file is left alone."""
    return list(value) if isinstance(value, Iterator) and not hasattr(value, "read") else value


def _methods(kind: type, name: str) -> Iterator[tuple[Any, str]]:
    """Where a class and all classes below it define a method."""
    if name in vars(kind):
        yield kind, name
    direct: list[type] = type.__subclasses__(kind)
    for part in direct:
        yield from _methods(part, name)


def _clips() -> Iterator[tuple[Any, str]]:
    """Where the functions that clip are looked up: PyTorch's own modules, and the user's that imported them."""
    own = (torch.nn.utils, torch.nn.utils.clip_grad)
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        # Thousands of modules are loaded, few import the function: where a file lies is asked of those alone.
        if original := getattr(torch.nn.utils, name, None):
            holders = [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is original]
            yield from ((m, name) for m in holders if m in own or is_users(getattr(m, "__file__", None) or "<"))


_STEPS = _Steps(register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
_OF_SCALERS = ("get_scale", "scale", "unscale_", "step", "update", "state_dict", "load_state_dict")
_KINDS: dict[str, _Kind] = {
    "optimizer_step": _STEPS,
    "optimizer_load": _Kind(lambda: [(Optimizer, "load_state_dict")]),
    "backward": _Kind(lambda: [(torch.autograd, "_engine_run_backward")]),
    "saved_hooks_entered": _Kind(lambda: [(torch.autograd.graph.saved_tensors_hooks, "__enter__")]),
    "region_made": _Kind(lambda: [(torch.autocast, "__init__")]),
    "region_entered": _Kind(lambda: [(torch.autocast, "__enter__")]),
    "region_left": _Kind(lambda: [(torch.autocast, "__exit__")]),
    **{f"scaler_{name.rstrip('_')}": _Kind(partial(_methods, torch.amp.GradScaler, name)) for name in _OF_SCALERS},
    "scheduler_step": _Kind(partial(_methods, LRScheduler, "step")),
    "clip": _Kind(_clips),
    "save": _Kind(lambda: [(torch, "save")]),
}


@contextmanager
def subscribed(**subscribers: Observer) -> Iterator[None]:
    """Subscribe to calls of PyTorch, each by the name of its kind, in every thread, while the block runs.

    Subscribers run in the order in which they subscribed, before the call and after it. Who subscribes within a call
    gets the next one; who leaves within it still gets its end. A subscriber that raises ends the call. Where the call
    raises, generators are closed (``finally`` runs); those of an optimizer's step later, by :func:`close_raised_steps`,
    the next step, or when the last subscriber leaves. A method that calls the one that it overrides is one call. Steps
    that a compiler traces are not reported.

    The kinds are ``optimizer_step`` and ``optimizer_load``; ``backward``, every run of the autograd engine;
    ``saved_hooks_entered``; ``region_made``, ``region_entered`` and ``region_left``, of :class:`torch.autocast`;
    ``scaler_...`` for each method of :class:`torch.amp.GradScaler`; ``scheduler_step``; ``clip``;
    and ``save``, of :func:`torch.save`.

    Raises:
        KeyError: there is no such kind.
    """
    with ExitStack() as stack:
        for name, subscriber in subscribers.items():
            stack.enter_context(_KINDS[name].subscribed(subscriber))
        yield


def steps_of(optimizer: Optimizer, subscriber: Observer) -> AbstractContextManager[None]:
    """Subscribe to the steps of one optimizer: after the hooks that it has, which may change its gradients."""
    return _Steps(optimizer.register_step_pre_hook, optimizer.register_step_post_hook).subscribed(subscriber)


def close_raised_steps() -> None:
    """Close the steps of this thread that raised; outside of any step."""
    _STEPS.close_raised(())


def method_of(kind: type, name: str, subscriber: Observer) -> AbstractContextManager[None]:
    """Subscribe to a method of a class, as that of a scaler that is none of PyTorch's."""
    owner = next(part for part in kind.__mro__ if name in vars(part))
    return observed(owner, name, subscriber)
