"""Every op of forward and backward as an `OpEvent`: its place in the model, and the dtypes that really ran."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.run import Where
from ampcheck.torchtools.origin import Origins
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import Scopes, op_name


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One op that ran. call: how often its module was entered before, from 0. inputs, outputs: the dtypes of its
    tensors in order of the schema."""

    where: Where
    call: int
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...] = ()


class Trace(TorchDispatchMode):
    """Record every op that runs inside, below autocast and autograd; `events` lists them in order.

    model: the module whose paths and calls events have; without one, they have the source line only. In backward an op
    has the place of the forward op whose autograd node it belongs to. Hooks are removed when the block ends, also by an
    exception. `failed` then is the op that raised. Ops inside higher-order ops are not recorded.
    """

    supports_higher_order_operators = True

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[OpEvent] = []
        self.failed: OpEvent | None = None
        self._scopes = Scopes(model)
        self._origins = Origins(self._scopes)
        self._open = ExitStack()

    def __enter__(self) -> Trace:
        with ExitStack() as opening:
            opening.enter_context(self._scopes.watched())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._open:
            super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        at = self._origins.current(sys._getframe())
        started = OpEvent(at.where(op_name(func)), at.call, _dtypes((args, kwargs)))
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self.failed = started
            raise
        self.events.append(replace(started, outputs=_dtypes(out)))
        return out


def _dtypes(value: object) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for _, t in tensors(value))
