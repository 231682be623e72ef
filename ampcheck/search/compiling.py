"""Compiled code: compiled once, and again only for a few kinds of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.core.text import cannot_run
from ampcheck.numerics.compiled import Graphs, measure_graphs
from ampcheck.parity.example import Example
from ampcheck.search.runner import Runner
from ampcheck.torchtools.pytree import tensors

KINDS = 4
"""Kinds of inputs (dtypes, dimensions, which sides are 0 or 1) that are compiled for; Dynamo's own limit is 8."""

_DRAWS = "the model draws random numbers, other ones in compiled code"


class Compiled:
    """`torch.compile(model, dynamic=True)`.

    examples: how many it ran. left_out: those of a kind beyond the first `KINDS`. ties: outputs that decisions near a
    tie explain. missing: what this machine lacks to run it.
    """

    def __init__(self, runner: Runner) -> None:
        self.examples = self.left_out = self.ties = 0
        self.missing = ""
        self._graphs = Graphs()
        self._kinds: set[Any] = set()
        self._runner = runner
        self._function: Callable[..., Any] | None = None

    def function_for(self, example: Example) -> Callable[..., Any] | None:
        """The compiled function; None where it is not run with this kind of input."""
        if self.missing or self._runner.draws:
            return None
        kind = tuple(
            (path, str(t.dtype), tuple(min(side, 2) for side in t.shape), t.is_contiguous())
            for path, t in tensors(example.values)
        )
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            self.left_out += 1
            return None
        self._kinds.add(kind)
        if self._function is None:
            self._function = torch.compile(self._runner.plain, dynamic=True)
        return self._function

    def cannot_run(self, error: BaseException) -> bool:
        """Return whether the machine lacks a compiler, or a kernel that compiled code calls."""
        self.missing = lacking(error, kernels=True)
        return bool(self.missing)

    def not_judged(self) -> str:
        """Why compiled code was not judged; "" where it was."""
        if self.missing:
            return f"not judged: {cannot_run(self.missing)}"
        if self._runner.draws:
            return _DRAWS
        if not self.examples:
            return "no example ran compiled"
        return self._graphs.why_none

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the graphs that are compiled inside. Dynamo is reset on the way in and out."""
        with measure_graphs() as self._graphs:
            yield
