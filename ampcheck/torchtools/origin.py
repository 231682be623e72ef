"""The origin of an op that runs: its phase, module and source line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache

from torch.autograd.graph import _engine_run_backward

from ampcheck.core.run import Where
from ampcheck.torchtools.private import backward_node, backward_task, sequence_number
from ampcheck.torchtools.source import Line, Scopes, users_line

_REMEMBERED = 100_000
"""Autograd nodes whose origins are kept: those of older nodes were run, or belong to a graph that is gone."""

_ENGINE = _engine_run_backward.__code__
"""The function under which backward runs. Its callers only start it."""

_where = lru_cache(maxsize=1 << 14)(Where)
"""Loops run through the same places again and again, and remember them for every autograd node."""


class Origins:
    """Maps each op, while it runs, to its origin.

    A backward op has the line of the code that the autograd engine calls (a hook, the backward of a custom function);
    else that of the forward op, which the number of the autograd node identifies.
    """

    def __init__(self, scopes: Scopes) -> None:
        self._scopes = scopes
        self._by_node: dict[int, Where] = {}

    def current(self, op: str = "", line: Callable[[], Line] | None = None) -> Where:
        """Where the op of this name runs; line: returns the user's line that runs it, where somebody has looked."""
        here = self._scopes.here
        backward = backward_task() != -1
        running = backward_node() if backward else None
        node = None if running is None else running._sequence_nr()
        if backward and not here.entered:  # else a checkpoint that recomputes its forward
            forward = self._by_node.get(node) if node is not None else None
            module = forward.module if forward is not None else ""
            called = users_line(sys._getframe(), inside=_ENGINE)
            if called[0]:
                return _where("backward", module, op, *called)
            if forward is not None:
                return _where("backward", module, op, forward.file, forward.line)
            # The accumulation of a gradient belongs to no op: the line that calls backward.
        file, number = users_line(sys._getframe()) if line is None else line()
        if backward and not here.entered:
            return _where("backward", "", op, file, number)
        phase = "backward" if backward else "update" if here.updates else "forward"
        where = _where(phase, here.entered[-1] if here.entered else "", op, file, number)
        # The node of an op is made before the op is dispatched, that of an autograd.Function before its forward runs
        # (without grad). Ops without a node see the number of the one before them: the first writer is the owner.
        node = sequence_number() - 1
        if node not in self._by_node:
            if len(self._by_node) >= _REMEMBERED:
                for old in list(self._by_node)[: _REMEMBERED // 2]:
                    del self._by_node[old]
            self._by_node[node] = where
        return where
