"""The origin of an op that runs: its phase, module and source line, in backward those of its forward op."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

import torch

from ampcheck.core.run import Where
from ampcheck.torchtools.source import Scopes, short_path, users_frame

_REMEMBERED = 100_000
"""Autograd nodes whose origins are kept: those of older nodes were run, or belong to a graph that is gone."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an op runs. call: how often the module was entered before, from 0."""

    phase: str
    module: str = ""
    call: int = 0
    file: str = ""
    line: int | None = None

    def where(self, op: str) -> Where:
        """The location of an op, as findings name it."""
        return _where(self.phase, self.module, op, self.file, self.line)


_where = lru_cache(maxsize=1 << 14)(Where)
_origin = lru_cache(maxsize=1 << 14)(Origin)
"""Loops run through the same places again and again, and remember them for every autograd node."""


class Origins:
    """Maps each op, while it runs, to its origin. A backward op is found by the number of its autograd node.

    calls: origins count how often their modules were entered before.
    """

    def __init__(self, scopes: Scopes, *, calls: bool = True) -> None:
        self._scopes, self._calls = scopes, calls
        self._by_node: dict[int, Origin] = {}
        self._paths: dict[str, str] = {}

    def current(self, frame: FrameType | None) -> Origin:
        """The origin of the op that a dispatch mode was called for; `frame`: where the search for user code starts."""
        backward, node = _backward_node()
        if backward and not self._scopes.inside:  # inside: a checkpoint that recomputes its forward
            origin = self._by_node.get(node) if node is not None else None
            if origin is None:  # the accumulation of a gradient belongs to no op: the line that calls backward
                return _origin("backward", "", 0, *self._line(frame))
            return _origin("backward", origin.module, origin.call, origin.file, origin.line)
        phase = "backward" if backward else self._scopes.phase
        module, call = self._scopes.current
        origin = _origin(phase, module, call if self._calls else 0, *self._line(frame))
        # The node of an op is made before the op is dispatched, that of an autograd.Function before its forward runs
        # (without grad). Ops without a node see the number of the one before them: the first writer is the owner.
        number = _newest_node()
        if number not in self._by_node:
            if len(self._by_node) >= _REMEMBERED:
                for old in list(self._by_node)[: _REMEMBERED // 2]:
                    del self._by_node[old]
            self._by_node[number] = origin
        return origin

    def _line(self, frame: FrameType | None) -> tuple[str, int | None]:
        path, line = users_frame(frame)
        if path not in self._paths:
            self._paths[path] = short_path(path)  # asks the system for the working directory
        return self._paths[path], line


def _backward_node() -> tuple[bool, int | None]:
    """Whether the autograd engine runs, and the sequence number of its node. Private names of torch 2.4 to 2.13."""
    if torch._C._current_graph_task_id() == -1:
        return False, None
    node = torch._C._current_autograd_node()
    return True, None if node is None else node._sequence_nr()


def _newest_node() -> int:
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]
