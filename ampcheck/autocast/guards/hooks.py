"""Hooks on backward passes, optimizer steps, autocast regions and threads. All are gone when their block ends."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from ampcheck.autocast.device import is_present
from ampcheck.autocast.guards.call_sites import call_site
from ampcheck.autocast.guards.recorder import OpsRecorder, Recorder, autocast_devices, current_state
from ampcheck.autocast.guards.region_source import switches_on
from ampcheck.autocast.state import nesting
from ampcheck.core.run import Where
from ampcheck.records.autocast import Crossing, State
from ampcheck.stream.calls import subscribed
from ampcheck.stream.ops import subscribed_here
from ampcheck.torchtools.private import backward_task
from ampcheck.torchtools.threads import wrapped_threads

Function = Callable[..., object]


def _enabled_states() -> tuple[State, ...]:
    """The states of the devices for which autocast is on in this thread."""
    states = (current_state(device) for device in autocast_devices())
    return tuple(state for state in states if state.dtype is not None)


def backward_and_steps(recorder: Recorder) -> AbstractContextManager[None]:
    """Count backward passes and optimizer steps, and record those inside a region."""

    def record(what: str, differentiable: bool = False) -> None:
        if not (recorder.active and recorder.thread.followed):
            return
        site = call_site(sys._getframe(2), backward=False)
        if site is None or site.compiled:
            return  # a compiler that traces forward and backward together
        recorder.counts[what] += 1
        if states := _enabled_states():
            where = site.where("backward" if what == "backward calls" else "update")
            recorder.crossings[Crossing(what, differentiable, states[0], recorder.regions, where)] += 1

    def backward(*args: object, **_: object) -> None:
        if backward_task() == -1:  # not a checkpoint's own, inside another
            record("backward calls", len(args) > 3 and args[3] is True)  # its create_graph
        if recorder.active:
            recorder.casts.differentiated(args[:1])

    return subscribed(backward=backward, optimizer_step=lambda *_, **__: record("optimizer steps"))


def regions(recorder: Recorder) -> AbstractContextManager[None]:
    """Count the outermost regions, follow those that a thread is in, and record those of devices that are not there."""

    def made(
        region: Any, device_type: str, dtype: object = None, enabled: bool = True, cache_enabled: object = None
    ) -> Iterator[None]:
        yield
        region._ampcheck_explicit = dtype is not None or not enabled
        region._ampcheck_idle = enabled and not region._enabled and not is_present(region.device)

    def entered(region: Any) -> None:
        if recorder.active and _is_idle(region, sys._getframe(1)):
            site = call_site(sys._getframe(1), backward=False)
            recorder.idle[site.where("forward") if site is not None else Where("forward")] = region.device
        elif recorder.active and nesting() == 0:
            recorder.regions += 1
        recorder.thread.regions.append(region)

    def left(region: torch.autocast, *_: object) -> Iterator[None]:
        if region in recorder.thread.regions:
            recorder.thread.regions.remove(region)
        yield
        if recorder.active and nesting() == 0:
            recorder.casts.clear()

    return subscribed(region_made=made, region_entered=entered, region_left=left)


def _is_idle(region: Any, frame: FrameType) -> bool:
    """Return whether PyTorch switched a region off since its device is not there; of one made before, its source says
    it."""
    if hasattr(region, "_ampcheck_idle"):
        return bool(region._ampcheck_idle)
    return region.device == "cuda" and not (region._enabled or is_present("cuda")) and switches_on(frame)


def threads(recorder: Recorder) -> AbstractContextManager[None]:
    """Follow the ops of threads that are started, and of work that is submitted to a pool of threads."""
    return wrapped_threads(lambda run: _followed(recorder, run), lambda: recorder.active and recorder.thread.followed)


def _followed(recorder: Recorder, run: Function) -> Function:
    """`run`, to be recorded in another thread, with this thread's autocast state as its parent's."""
    parent = {state.device: state for state in _enabled_states()}
    if parent:
        recorder.counts["threads"] += 1

    @functools.wraps(run)
    def follow(*args: object, **kwargs: object) -> object:
        thread = recorder.thread
        before = thread.followed, thread.parent, thread.regions
        thread.followed, thread.parent, thread.regions = True, parent, []
        try:
            with subscribed_here(OpsRecorder(recorder)):
                return run(*args, **kwargs)
        finally:
            thread.followed, thread.parent, thread.regions = before

    return follow
