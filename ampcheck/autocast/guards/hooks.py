"""Taps on backward passes, optimizer steps, autocast regions and threads. All are gone when their block ends."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _pop_mode, _push_mode

from ampcheck.autocast.guards.call_sites import spot_of
from ampcheck.autocast.guards.ops import Notes, OpsMode, autocast_devices, current_state
from ampcheck.autocast.guards.records import Crossing, State
from ampcheck.autocast.state import nesting
from ampcheck.torchtools.patching import replaced


def states_on() -> tuple[State, ...]:
    """The devices for which autocast is on in this thread."""
    found = (current_state(device) for device in autocast_devices())
    return tuple(state for state in found if state.dtype is not None)


@contextmanager
def watched_scope(notes: Notes) -> Iterator[None]:
    """Count backward passes and optimizer steps, and note those inside a region."""

    def cross(what: str, part: bool = False) -> None:
        if not (notes.open and notes.here.watched):
            return
        spot = spot_of(sys._getframe(2), backward=False)
        if spot is None or spot.compiled:
            return  # a compiler that traces forward and backward together
        notes.counts[what] += 1
        if states := states_on():
            notes.crossings[Crossing(what, part, states, notes.region, spot.file, spot.line)] += 1

    def make(run: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:  # not a checkpoint's own, inside another
                cross("backward calls", part=len(args) > 3 and args[3] is True)  # its create_graph
            return run(*args, **kwargs)

        return backward

    # The one function through which Tensor.backward, autograd.backward and autograd.grad enter the engine.
    with replaced(torch.autograd, "_engine_run_backward", make):
        handle = register_optimizer_step_pre_hook(lambda *_: cross("optimizer steps"))
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def watched_regions(notes: Notes) -> Iterator[None]:
    """Count the outermost regions, and note which regions a thread enters with a choice of its own."""
    region = torch.amp.autocast_mode.autocast

    def begin(original: Any) -> Any:
        def __init__(  # noqa: N807
            self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            original(self, device_type, dtype, enabled, cache_enabled)
            self._ampcheck_explicit = dtype is not None or not enabled

        return __init__

    def enter(original: Any) -> Any:
        def __enter__(self: Any) -> Any:  # noqa: N807
            if notes.open and nesting() == 0:
                notes.region += 1
            notes.here.chosen.append((self.device, getattr(self, "_ampcheck_explicit", True)))
            return original(self)

        return __enter__

    def leave(original: Any) -> Any:
        def __exit__(self: Any, *exc: Any) -> Any:  # noqa: N807
            if notes.here.chosen:
                notes.here.chosen.pop()
            left = original(self, *exc)
            if notes.open and nesting() == 0:
                notes.casts.forget()
            return left

        return __exit__

    with (
        replaced(region, "__init__", begin),
        replaced(region, "__enter__", enter),
        replaced(region, "__exit__", leave),
    ):
        yield


@contextmanager
def watched_threads(notes: Notes) -> Iterator[None]:
    """Follow the ops of threads that are started, and of work that is handed to a pool of threads."""

    def start(original: Any) -> Any:
        def begin(self: threading.Thread) -> None:
            if notes.open and notes.here.watched and not _works_for_a_pool(self):
                self.run = _followed(notes, self.run)  # type: ignore[method-assign]
            original(self)

        return begin

    def submit(original: Any) -> Any:
        def hand_over(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            followed = _followed(notes, fn) if notes.open and notes.here.watched else fn
            return original(self, followed, *args, **kwargs)

        return hand_over

    def hand_on(original: Any) -> Any:
        def call(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            follows = isinstance(self, ThreadPool) and notes.open and notes.here.watched
            return original(self, _followed(notes, func) if follows else func, *args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(replaced(threading.Thread, "start", start))
        stack.enter_context(replaced(ThreadPoolExecutor, "submit", submit))
        for name in ("apply_async", "_map_async", "imap", "imap_unordered"):  # all others call one of these
            stack.enter_context(replaced(Pool, name, hand_on))
        yield


def _works_for_a_pool(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return getattr(target, "__module__", "") in ("concurrent.futures.thread", "multiprocessing.pool")


def _followed(notes: Notes, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, to be called in another thread and followed there, with this thread's autocast state as its parent's."""
    parent = {state.device: state for state in states_on()}
    if parent:
        notes.counts["threads"] += 1

    @functools.wraps(run)
    def follow(*args: Any, **kwargs: Any) -> Any:
        here = notes.here
        held = here.watched, here.parent, here.chosen
        here.watched, here.parent, here.chosen = True, parent, []
        # The stack of modes belongs to the thread; the mode's own __enter__ also sets flags of the process, which a
        # thread that outlives the block would set back wrongly.
        mode = OpsMode(notes)  # PyTorch 2.4 keeps no reference of its own
        _push_mode(mode)
        try:
            return run(*args, **kwargs)
        finally:
            _pop_mode()
            here.watched, here.parent, here.chosen = held

    return follow
