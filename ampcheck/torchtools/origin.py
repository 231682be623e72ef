"""The origin of an op that runs: its phase, module and source line; and `Trace`, which records every op with it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from ampcheck.core.run import Where
from ampcheck.torchtools.modes import DispatchMode
from ampcheck.torchtools.private import OpOverload, backward_node, backward_task, sequence_number
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import Scopes, op_name, short_path, users_frame

_REMEMBERED = 100_000
"""Autograd nodes whose origins are kept: those of older nodes were run, or belong to a graph that is gone."""

_ENGINE = _engine_run_backward.__code__
"""The function under which backward runs. Its callers only start it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an op runs."""

    phase: str
    module: str = ""
    file: str = ""
    line: int | None = None

    def where(self, op: str) -> Where:
        """The location of an op, as findings name it."""
        return _where(self.phase, self.module, op, self.file, self.line)


_where = lru_cache(maxsize=1 << 14)(Where)
_origin = lru_cache(maxsize=1 << 14)(Origin)
"""Loops run through the same places again and again, and remember them for every autograd node."""


class Origins:
    """Maps each op, while it runs, to its origin.

    A backward op has the line of the code that the autograd engine calls (a hook, the backward of a custom function);
    else that of the forward op, which the number of the autograd node identifies.
    """

    def __init__(self, scopes: Scopes) -> None:
        self._scopes = scopes
        self._by_node: dict[int, Origin] = {}
        self._paths: dict[str, str] = {}

    def current(self, frame: FrameType | None) -> Origin:
        """The origin of the op that a dispatch mode was called for; `frame`: where the search for user code starts."""
        backward, node = _backward_node()
        if backward and not self._scopes.inside:  # inside: a checkpoint that recomputes its forward
            origin = self._by_node.get(node) if node is not None else None
            module = origin.module if origin is not None else ""
            called = self._line(frame, inside=_ENGINE)
            if called[0]:
                return _origin("backward", module, *called)
            if origin is None:  # the accumulation of a gradient belongs to no op: the line that calls backward
                return _origin("backward", "", *self._line(frame))
            return _origin("backward", module, origin.file, origin.line)
        phase = "backward" if backward else self._scopes.phase
        origin = _origin(phase, self._scopes.current, *self._line(frame))
        # The node of an op is made before the op is dispatched, that of an autograd.Function before its forward runs
        # (without grad). Ops without a node see the number of the one before them: the first writer is the owner.
        number = sequence_number() - 1
        if number not in self._by_node:
            if len(self._by_node) >= _REMEMBERED:
                for old in list(self._by_node)[: _REMEMBERED // 2]:
                    del self._by_node[old]
            self._by_node[number] = origin
        return origin

    def _line(self, frame: FrameType | None, inside: CodeType | None = None) -> tuple[str, int | None]:
        path, line = users_frame(frame, inside=inside)
        if not path:
            return "", None
        if path not in self._paths:
            self._paths[path] = short_path(path)  # asks the system for the working directory
        return self._paths[path], line


def _backward_node() -> tuple[bool, int | None]:
    """Whether the autograd engine runs, and the sequence number of its node. Private names of torch 2.4 to 2.13."""
    if backward_task() == -1:
        return False, None
    node = backward_node()
    return True, None if node is None else node._sequence_nr()


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One op that ran. inputs, outputs: the dtypes of its tensors in order of the schema."""

    where: Where
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...] = ()


class Trace(DispatchMode):
    """Record every op that runs inside, below autocast and autograd; `events` lists them in order.

    model: the module whose paths events have; without one, they have the source line only. In backward an op
    has the place of the forward op whose autograd node it belongs to. Hooks are removed when the block ends, also by an
    exception. `failed` then is the op that raised. Ops inside higher-order ops are not recorded.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.events: list[OpEvent] = []
        self.failed: OpEvent | None = None
        self._scopes = Scopes(model)
        self._origins = Origins(self._scopes)
        self._open = ExitStack()

    def __enter__(self) -> Trace:
        with ExitStack() as opening:
            opening.enter_context(self._scopes.watched())
            super().__enter__()
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._open:
            super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        at = self._origins.current(sys._getframe())
        started = OpEvent(at.where(op_name(func)), _dtypes((args, kwargs)))
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self.failed = started
            raise
        self.events.append(replace(started, outputs=_dtypes(out)))
        return out


def _dtypes(value: object) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for _, t in tensors(value))
