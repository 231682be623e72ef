"""`Trace`: a record of every op, with its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampcheck.core.run import Where
from ampcheck.stream.ops import OpEvent, OpSubscriber, leaves
from ampcheck.torchtools.origin import Origins
from ampcheck.torchtools.source import Scopes


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One op that ran. inputs, outputs: the dtypes of its tensors in order of the schema."""

    where: Where
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...] = ()


class Trace(OpSubscriber):
    """Record every op that runs inside, below autocast and autograd; `events` lists them in order.

    model: the module whose paths events have; without one, they have the source line only. In backward an op
    has the place of the forward op whose autograd node it belongs to. Hooks are removed when the block ends, also by an
    exception. `failed` then is the op that raised. Ops inside higher-order ops are not recorded.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.events: list[TracedOp] = []
        self.failed: TracedOp | None = None
        self._scopes = Scopes(model)
        self._origins = Origins(self._scopes)

    def around(self) -> Iterator[AbstractContextManager[Any]]:
        """The scopes of the modules."""
        yield self._scopes.watched()

    def see(self, event: OpEvent) -> Any:
        """Record an op."""
        if event.higher:
            return event.run()
        started = TracedOp(self._origins.current(event.traits.title, event.line), _dtypes(event.tensors))
        try:
            out = event.run()
        except BaseException:
            self.failed = started
            raise
        self.events.append(replace(started, outputs=_dtypes(leaves(out))))
        return out


def _dtypes(tensors: Iterable[torch.Tensor]) -> tuple[torch.dtype, ...]:
    return tuple([tensor.dtype for tensor in tensors])
