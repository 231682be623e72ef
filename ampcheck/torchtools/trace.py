"""Every op of forward and backward as an `OpEvent`: its module, its source line, and the dtypes that really ran.

A `Trace` is a dispatch mode below autocast and autograd. In backward an op has the module and the source line of the
forward op whose autograd node it belongs to.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.run import Where
from ampcheck.health import PendingHealth, Unmeasured, measure_health
from ampcheck.torchtools.origin import Origins
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.source import Scopes, op_name


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One op that ran.

    `op` is the overload (`aten::addmm`, `aten::sum.dim_IntList`); `module` the dotted path of the innermost module
    (`""` is the root); `call` counts from 0 how often that module was entered before; `inputs` and `outputs` are the
    dtypes of the tensors in order of the schema; `health` that of each floating output, where it is measured.
    """

    index: int
    phase: str
    module: str
    call: int
    op: str
    file: str
    line: int | None
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    health: tuple[PendingHealth | Unmeasured, ...] = ()

    @property
    def where(self) -> Where:
        """The location of this event, as findings name it."""
        return Where(phase=self.phase, module=self.module, op=self.op, file=self.file, line=self.line)


class Observer(Protocol):
    """Sees each op with its tensors, which an event does not keep alive."""

    def before(self, op: torch._ops.OpOverload, args: object, kwargs: object, /) -> Any:
        """Called before the op runs; its result is handed to `after`."""

    def after(
        self, event: OpEvent, op: torch._ops.OpOverload, args: object, kwargs: object, out: object, token: object, /
    ) -> Any:
        """Called after the op ran, unless it raised. A result other than None replaces that of the op."""


class Trace(TorchDispatchMode):
    """Record every op that runs inside; `events` lists them in order.

    model: the module whose paths and calls events have; without one, they have the source line only.
    health: measure each floating output.
    observers: see the tensors themselves.

    Hooks and modes are removed when the block ends, also by an exception. `failed` then is the op that raised.
    Ops inside higher-order ops (`torch.cond`, `flex_attention`) are not recorded; `unseen` counts these.
    """

    supports_higher_order_operators = True

    def __init__(
        self, model: torch.nn.Module | None = None, *, health: bool = False, observers: tuple[Observer, ...] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[OpEvent] = []
        self.failed: OpEvent | None = None
        self.unseen: dict[str, int] = {}
        self._health = health
        self._observers = observers
        self._scopes = Scopes(model)
        self._origins = Origins(self._scopes)
        self._open = ExitStack()

    def __enter__(self) -> Trace:
        self._open.enter_context(self._scopes.watched())
        try:
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            super().__exit__(*exc)  # type: ignore[no-untyped-call]
        finally:
            self._open.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            reason = f"what runs inside {func}"
            self.unseen[reason] = self.unseen.get(reason, 0) + 1
            return func(*args, **kwargs)
        at = self._origins.current(sys._getframe())
        started = OpEvent(
            len(self.events), at.phase, at.module, at.call, op_name(func), at.file, at.line, _dtypes((args, kwargs)), ()
        )
        tokens = [observer.before(func, args, kwargs) for observer in self._observers]
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self.failed = started
            raise
        outputs = [t for _, t in tensors(out)]
        health = tuple(measure_health(t) for t in outputs if t.is_floating_point()) if self._health else ()
        event = replace(started, outputs=tuple(t.dtype for t in outputs), health=health)
        self.events.append(event)
        for observer, token in zip(self._observers, tokens, strict=True):
            replaced = observer.after(event, func, args, kwargs, out, token)
            out = out if replaced is None else replaced
        return out


def _dtypes(value: object) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for _, t in tensors(value))
