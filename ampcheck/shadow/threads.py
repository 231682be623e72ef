"""Other threads: their ops are counted and not followed; the tensors that they write become data."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ampcheck.shadow.call import floating_values, op_schema
from ampcheck.shadow.companions import CompanionStore
from ampcheck.torchtools.threads import Function, wrapped_threads

_REASON = "ops of other threads"


class OtherThread(TorchDispatchMode):
    """Counts the ops of another thread, and forgets the companions of what they write."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A thread may outlive the block, and compiles then as without the mode."""
        return True

    def __init__(self, watch: _Threads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types or ()):
            return NotImplemented
        out = func(*args, **kwargs)
        if self._watch.active and isinstance(func, torch._ops.OpOverload):
            self._watch.note(func, args, kwargs)
        return out


class _Threads:
    def __init__(self, store: CompanionStore, counts: Counter[str]) -> None:
        self.active = True
        self._store, self._counts = store, counts

    def note(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = op_schema(op)
        if schema.view:
            return
        self._counts[_REASON] += 1
        for position, name in schema.writes:
            for tensor in floating_values(args[position] if position < len(args) else kwargs.get(name)):
                self._store.forget(tensor)

    def followed(self, run: Function) -> Function:
        @functools.wraps(run)
        def follow(*args: object, **kwargs: object) -> object:
            # The stack of modes belongs to the thread; `__enter__` also sets flags of the process, which a thread that
            # outlives the block would set back wrongly.
            mode = OtherThread(self)
            _push_mode(mode)
            try:
                return run(*args, **kwargs)
            finally:
                _pop_mode()

        return follow


@contextmanager
def watched_threads(shadow: TorchDispatchMode, store: CompanionStore, counts: Counter[str]) -> Iterator[None]:
    """Count the ops of threads that are started inside, also by such threads, into `counts`."""
    threads = _Threads(store, counts)

    def follows() -> bool:
        stack = _get_current_dispatch_mode_stack()
        return threads.active and any(mode is shadow or isinstance(mode, OtherThread) for mode in stack)

    try:
        with wrapped_threads(threads.followed, follows):
            yield
    finally:
        threads.active = False
