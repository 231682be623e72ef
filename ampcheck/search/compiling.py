"""The compiled arm: compiled once, and again only for a few kinds of inputs."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.autocast.missing import lacking
from ampcheck.search.arms import Arms, Example, Outputs
from ampcheck.torchtools.pytree import tensors

KINDS = 4
"""Kinds of inputs (dtypes, dimensions, which sides are 0 or 1) that are compiled for; Dynamo's own limit is 8."""


class Compiled:
    """`torch.compile(model, dynamic=True)`; examples of a kind beyond the first `KINDS` are counted and not run."""

    def __init__(self, arms: Arms) -> None:
        self.examples = 0
        self.left_out = 0
        self.missing = ""
        self.kinds: set[Any] = set()
        self._arms = arms
        self._function: Any = None

    def __call__(self, example: Example) -> Outputs | None:
        """What compiled code gives; None where this kind of input is not compiled for."""
        kind = tuple(
            (path, str(t.dtype), tuple(min(side, 2) for side in t.shape), t.is_contiguous())
            for path, t in tensors((example.args, dict(example.kwargs)))
        )
        if self.missing:
            return None
        if kind not in self.kinds and len(self.kinds) >= KINDS:
            self.left_out += 1
            return None
        self.kinds.add(kind)
        if self._function is None:
            self._function = torch.compile(self._arms.plain, dynamic=True)
        outputs = self._arms.compiled(example, self._function)
        self.examples += outputs.error is None
        return outputs

    def cannot_run(self, error: BaseException) -> bool:
        """Whether the machine lacks a compiler, or a kernel that compiled code calls: the reason for a skip then."""
        self.missing = lacking(error, kernels=True)
        return bool(self.missing)
