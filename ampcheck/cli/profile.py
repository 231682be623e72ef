"""Where the time and the memory of an audit go, stage by stage.

A thread samples the stack of the audit and the resident set of the process. Compilers run in processes of their own:
their time is that of the call that waits for them, and their memory is not counted.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import ampcheck
from ampcheck.core.process_memory import resident_memory

_INTERVAL = 0.005
"""Seconds between samples."""

_LEAST = 0.03
"""The share of a stage below which a function is left out."""

_SHORTEST = 0.05
"""Seconds of a stage below which it is left out."""

_PASS_THROUGH_SHARE = 0.95
"""The share of its caller's time from which a function stands in its caller's place."""

_DEEPEST = 8
"""Levels of a flame that are printed."""

_BAR = 20
"""Characters of a bar for a whole stage."""

_MIB = 1 << 20
_PACKAGE = Path(ampcheck.__file__).parent
_STAGES = "stages.py:run_stages"


@dataclass(slots=True)
class _Node:
    """Seconds in a function and in all that it called."""

    seconds: float = 0.0
    callees: dict[str, _Node] = field(default_factory=dict)

    def add(self, stack: Sequence[str], seconds: float) -> None:
        """Count a sample of a stack, outermost function first."""
        node = self
        node.seconds += seconds
        for name in stack:
            node = node.callees.setdefault(name, _Node())
            node.seconds += seconds


@dataclass(slots=True)
class _Stage:
    root: _Node = field(default_factory=_Node)
    peak: int = 0


class Profile:
    """Samples the thread that made it from `begin` to `end`."""

    def __init__(self) -> None:
        self._stages: dict[str, _Stage] = {}
        self._stage = ""
        self._sampled = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="ampcheck profile", daemon=True)
        self._thread.start()

    def begin(self, stage: str) -> None:
        """Count what follows to a stage."""
        self._stage = stage

    def end(self) -> None:
        """Sample no more."""
        self._ended.set()
        self._thread.join()

    def lines(self) -> list[str]:
        """A flame for each stage, in their order."""
        return [line for title, stage in self._stages.items() if title for line in _flame(title, stage)]

    def _sample(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_INTERVAL):
            stage, now = self._stages.setdefault(self._stage, _Stage()), time.monotonic()
            stage.root.add(_names(sys._current_frames().get(self._sampled)), now - last)
            stage.peak = max(stage.peak, resident_memory() or 0)
            last = now


def _names(frame: FrameType | None) -> list[str]:
    """Functions from the outermost to the innermost of a stage. Those of the standard library are left out, those of a
    package stand together."""
    names: list[str] = []
    while frame is not None:
        name = _name(frame.f_code)
        if name == _STAGES:
            break
        if name and (not names or names[-1] != name):
            names.append(name)
        frame = frame.f_back
    return names[::-1]


@functools.lru_cache(maxsize=10_000)
def _name(code: CodeType) -> str:
    path = Path(code.co_filename)
    if path.is_relative_to(_PACKAGE):
        return f"{path.relative_to(_PACKAGE).as_posix()}:{code.co_name}"
    for folder in ("site-packages", "dist-packages"):
        if folder in path.parts:
            return path.parts[path.parts.index(folder) + 1].removesuffix(".py")
    if path.is_relative_to(Path(threading.__file__).parent) or code.co_filename.startswith("<"):
        return ""
    return f"{path.name}:{code.co_name}"


def _flame(title: str, stage: _Stage) -> Iterator[str]:
    if stage.root.seconds < _SHORTEST:
        return
    memory = f", at most {stage.peak / _MIB:,.0f} MiB" if stage.peak else ""
    yield f"{title}: {stage.root.seconds:.1f} s{memory}"
    yield from _below(stage.root, stage.root.seconds, 0)


def _below(node: _Node, whole: float, depth: int) -> Iterator[str]:
    """The callees of a function, the longest first. whole: seconds of the stage."""
    for name, callee in sorted(node.callees.items(), key=lambda item: -item[1].seconds):
        if callee.seconds < _LEAST * whole or depth == _DEEPEST:
            continue
        only = max(callee.callees.items(), key=lambda item: item[1].seconds, default=None)
        if only is not None and only[1].seconds >= _PASS_THROUGH_SHARE * callee.seconds:
            yield from _below(callee, whole, depth)
            continue
        share = callee.seconds / whole
        yield f"  {share:4.0%} {'█' * max(1, round(_BAR * share)):{_BAR}} {'  ' * depth}{name}"
        yield from _below(callee, whole, depth + 1)
