"""The autocast regions that a thread is in, and whose frame keeps each of them open."""

from __future__ import annotations

import dis
import inspect
import os
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import torch

from ampcheck.autocast.device import is_present
from ampcheck.autocast.guards.call_sites import call_site, frames
from ampcheck.autocast.guards.stats import Call, Region, State
from ampcheck.core.run import Where
from ampcheck.torchtools.source import AMPCHECK, short_path

_ENTERS = ("__enter__", "__aenter__", "enter_context", "enter_async_context")
"""Functions that enter a region on behalf of their caller."""

_DECORATORS = {"decorate_autocast": "autocast_mode.py", "inner": "contextlib.py"}
"""Functions that enter a region around a call of their variable `func`, by name, and their files."""

_available = cache(is_present)  # asked for every region

_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_WRAPS_CALLS = f"{os.sep}pluggy{os.sep}"
"""Its frames resume generators before and after the calls that those are to wrap: pytest's hook wrappers."""


@dataclass(slots=True, eq=False)
class Suspended:
    """A frame that may be suspended inside a region, and the frame whose own code runs meanwhile.

    The consumer of a generator is the function that loops over it. A coroutine is its own: any code may run meanwhile.
    """

    owner: FrameType
    consumer: FrameType

    def lets_in(self, frame: FrameType | None) -> bool:
        """Whether `frame` runs while the owner is suspended, by code that the owner does not wrap on purpose."""
        stack = list(frames(frame))
        if any(outer is self.owner for outer in stack):
            return False
        if self.consumer.f_code.co_flags & _COROUTINE:
            return not _returned(self.consumer)  # else it entered the region for its caller
        return any(outer is self.consumer for outer in stack)


@dataclass(slots=True, eq=False)
class OpenRegion:
    """A region that a thread has entered and not left.

    explicit: it names a dtype or is off. asked: the user wants it on. state: of its device, since it was entered.
    ops: how many ops of its device it saw. others: ops of devices that no region is for.
    """

    region: torch.autocast
    explicit: bool
    asked: bool
    state: State
    place: Region
    suspended: Suspended | None
    ops: int = 0
    others: dict[Call, None] = field(default_factory=dict)


def entering(frame: FrameType | None) -> FrameType | None:
    """The frame that keeps a region open which `frame` enters.

    A context manager enters it for the `with` statement around it, and so does a generator that one resumes.
    """
    while frame is not None and frame.f_back is not None:
        code = frame.f_code
        resumed = code.co_flags & (_GENERATOR | _COROUTINE) and frame.f_back.f_code.co_name in _ENTERS
        if not (resumed or code.co_name in _ENTERS or code.co_filename.startswith(AMPCHECK)):
            break
        frame = frame.f_back
    return frame


def suspended(owner: FrameType | None) -> Suspended | None:
    """The frame that keeps a region open as one that may be suspended; None for that of a function."""
    if owner is None or not owner.f_code.co_flags & (_GENERATOR | _COROUTINE):
        return None
    consumer = owner
    while consumer.f_code.co_flags & _GENERATOR and consumer.f_back is not None:
        consumer = consumer.f_back
    return None if _WRAPS_CALLS in consumer.f_code.co_filename else Suspended(owner, consumer)


def decorated(owner: FrameType | None) -> Region | None:
    """The generator or coroutine function around whose call a region is entered; None where there is none."""
    code = owner.f_code if owner is not None else None
    if owner is None or code is None or os.path.basename(code.co_filename) != _DECORATORS.get(code.co_name):
        return None
    function: Any = owner.f_locals.get("func")
    own = getattr(getattr(function, "func", function), "__code__", None)
    kinds = {
        "generator": inspect.isgeneratorfunction(function),
        "coroutine": inspect.iscoroutinefunction(function),
        "asynchronous generator": inspect.isasyncgenfunction(function),
    }
    kind = next((name for name, is_one in kinds.items() if is_one), "")
    if not kind or own is None or code.co_flags & _COROUTINE:  # a coroutine that awaits what it decorates
        return None
    where = Where("forward", file=short_path(own.co_filename), line=own.co_firstlineno)
    return Region(f"the {kind} {own.co_name}", where)


def place_of(region: torch.autocast, frame: FrameType | None) -> Region:
    """A region by the user's line that enters it."""
    site = call_site(frame, backward=False)
    where = site.where("forward") if site is not None else Where("forward")
    return Region(f"torch.autocast({region.device!r})", where, region.device, _available(region.device))


def _returned(frame: FrameType) -> bool:
    """Whether a frame that does not run now has returned, and is not suspended."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")
