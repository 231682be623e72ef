"""The recorder of calls. PyTorch is hooked here, once for each kind of call, while somebody subscribes to it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.source import is_users

Subscriber: TypeAlias = Callable[..., Iterator[None] | None]
"""Gets the arguments of a call before it. A generator function goes on after it, with the result: `result = yield`."""

_Place: TypeAlias = tuple[Any, str]
_lock = threading.RLock()


class _Call:
    """A call that runs, known by its first argument, and what its subscribers do after it. frame: of a step."""

    def __init__(self, first: object, frame: FrameType | None = None) -> None:
        self.first, self.frame = first, frame
        self._after: list[tuple[Subscriber, Any]] = []

    def begin(self, subscribers: Iterable[Subscriber], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run what stands before each `yield`."""
        for subscriber in subscribers:
            if (after := subscriber(*args, **kwargs)) is not None:
                next(after)
                self._after.append((subscriber, after))

    def end(self, result: object) -> None:
        """Run what stands after each `yield`."""
        for _, after in self._after:
            with suppress(StopIteration):
                after.send(result)

    def close(self, subscriber: Subscriber | None = None) -> None:
        """Close the generators, or those of one subscriber, that have not ended."""
        for known, after in self._after:
            if subscriber is None or known == subscriber:
                after.close()


class _Running(threading.local):
    """The calls of one kind that run in this thread, the outermost first."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class _Kind:
    """The subscribers to one kind of call.

    places: the functions, each by its owner and name. iterators: whether an argument may be one, which is then read
    once for all.
    """

    def __init__(self, places: Callable[[], Iterable[_Place]], *, iterators: bool = False) -> None:
        self._places, self._iterators = places, iterators
        self._subscribers: tuple[Subscriber, ...] = ()
        self._hooked: dict[_Place, object] = {}
        self._hooks, self._running = ExitStack(), _Running()

    @contextmanager
    def subscribed(self, subscriber: Subscriber) -> Iterator[None]:
        """Call `subscriber` around each call."""
        with _lock:
            self._hook()
            self._subscribers += (subscriber,)
        try:
            yield
        finally:
            with _lock:
                remaining = list(self._subscribers)
                remaining.remove(subscriber)
                self._subscribers = tuple(remaining)
                self._left(subscriber)
                if not remaining:
                    self._hooks.close()
                    self._hooked.clear()

    def _hook(self) -> None:
        """Hook the functions that are not hooked yet, as those of a class that is new."""
        for owner, name in self._places():
            if getattr(owner, name) not in self._hooked.values():
                self._hooks.enter_context(replaced(owner, name, self._make))
                self._hooked[owner, name] = getattr(owner, name)

    def _left(self, subscriber: Subscriber) -> None:
        pass

    def _make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls = self._running.calls
            if any(known.first is first for known in calls for first in args[:1]):
                return original(*args, **kwargs)  # a method that calls the one that it overrides
            if self._iterators:
                args = tuple(map(_read, args))
                kwargs = {name: _read(value) for name, value in kwargs.items()}
            call = _Call(args[0] if args else None)
            calls.append(call)
            try:
                call.begin(self._subscribers, args, kwargs)
                result = original(*args, **kwargs)
                call.end(result)
            finally:
                calls.remove(call)
                call.close()
            return result

        return run


class _Steps(_Kind):
    """The subscribers to the steps of all optimizers, or of one. They have no result, and may raise unseen."""

    def __init__(self, *registers: Callable[[Any], RemovableHandle]) -> None:
        super().__init__(tuple)
        self._registers = registers

    def _hook(self) -> None:
        if not self._subscribers:
            for register, hook in zip(self._registers, (self._before, self._after), strict=True):
                self._hooks.callback(register(hook).remove)

    def _left(self, subscriber: Subscriber) -> None:
        for call in self._running.calls:
            call.close(subscriber)
        if not self._subscribers:
            self._running = _Running()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            calls, frame = self._running.calls, sys._getframe(1)
            while calls and not _runs(calls[-1].frame, frame):
                calls.pop().close()
            calls.append(_Call(optimizer, frame))
            calls[-1].begin(self._subscribers, args, kwargs)

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        calls = self._running.calls
        if not torch.compiler.is_compiling() and any(call.first is optimizer for call in calls):
            while (call := calls.pop()).first is not optimizer:
                call.close()  # it raised
            call.end(None)


def _runs(frame: FrameType | None, inside: FrameType | None) -> bool:
    """Whether a frame is `inside` or one of its callers."""
    while inside is not None and inside is not frame:
        inside = inside.f_back
    return inside is not None


def _read(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


def _methods(kind: type, name: str) -> list[_Place]:
    """Where a class and all classes below it define a method."""
    direct: list[type] = type.__subclasses__(kind)
    below = (place for part in direct for place in _methods(part, name))
    return list(dict.fromkeys((*([(kind, name)] if name in vars(kind) else ()), *below)))


def _clips() -> Iterator[_Place]:
    """Where the functions that clip are looked up: PyTorch's own modules, and the user's that imported them."""
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        if (original := getattr(torch.nn.utils, name, None)) is not None:
            # Thousands of modules are loaded, few import the function: where a file lies is asked of those alone.
            importing = [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is original]
            own = (torch.nn.utils, torch.nn.utils.clip_grad)
            users = (m for m in importing if isinstance(file := getattr(m, "__file__", None), str) and is_users(file))
            yield from ((module, name) for module in (*own, *users) if vars(module).get(name) is original)


_REGION, _SCALER = torch.amp.autocast_mode.autocast, torch.amp.GradScaler
_KINDS: dict[str, _Kind] = {
    "optimizer_step": _Steps(register_optimizer_step_pre_hook, register_optimizer_step_post_hook),
    "optimizer_load": _Kind(lambda: [(Optimizer, "load_state_dict")]),
    "backward": _Kind(lambda: [(torch.autograd, "_engine_run_backward")]),
    "saved_hooks_entered": _Kind(lambda: [(torch.autograd.graph.saved_tensors_hooks, "__enter__")]),
    "region_made": _Kind(lambda: [(_REGION, "__init__")]),
    "region_entered": _Kind(lambda: [(_REGION, "__enter__")]),
    "region_left": _Kind(lambda: [(_REGION, "__exit__")]),
    "scaler_get_scale": _Kind(partial(_methods, _SCALER, "get_scale")),
    "scaler_scale": _Kind(partial(_methods, _SCALER, "scale")),
    "scaler_unscale": _Kind(partial(_methods, _SCALER, "unscale_")),
    "scaler_step": _Kind(partial(_methods, _SCALER, "step")),
    "scaler_update": _Kind(partial(_methods, _SCALER, "update")),
    "scaler_save": _Kind(partial(_methods, _SCALER, "state_dict")),
    "scaler_load": _Kind(partial(_methods, _SCALER, "load_state_dict")),
    "scheduler_step": _Kind(partial(_methods, LRScheduler, "step")),
    "clip": _Kind(_clips, iterators=True),
    "save": _Kind(lambda: [(torch, "save")]),
}


@contextmanager
def subscribed(**subscribers: Subscriber) -> Iterator[None]:
    """Subscribe to calls of PyTorch, each by the name of its kind, in every thread, while the block runs.

    Subscribers run in the order in which they subscribed, before the call and after it. Who subscribes within a call
    gets the next one. A subscriber that raises ends the call. A generator is closed where the call raises: code that is
    to run nevertheless stands in a ``finally``. The step of an optimizer that raises is closed later, before the next
    step or at the end of the subscription, which also closes a step that runs. A method that calls the one that it
    overrides is one call. Steps that a compiler traces are not reported.

    The kinds are ``optimizer_step`` and ``optimizer_load``; ``backward``, every run of the autograd engine;
    ``saved_hooks_entered``; ``region_made``, ``region_entered`` and ``region_left``, of :class:`torch.autocast`;
    ``scaler_get_scale``, ``scaler_scale``, ``scaler_unscale``, ``scaler_step``, ``scaler_update``, ``scaler_save`` and
    ``scaler_load``, of :class:`torch.amp.GradScaler`; ``scheduler_step``; ``clip``; and ``save``.

    Raises:
        KeyError: there is no such kind.
    """
    with ExitStack() as stack:
        for name, subscriber in subscribers.items():
            stack.enter_context(_KINDS[name].subscribed(subscriber))
        yield


def steps_of(optimizer: Optimizer, subscriber: Subscriber) -> AbstractContextManager[None]:
    """Subscribe to the steps of one optimizer: after the hooks that it has, which may change its gradients."""
    return _Steps(optimizer.register_step_pre_hook, optimizer.register_step_post_hook).subscribed(subscriber)
