"""Other threads: their floating ops are counted and not followed; the tensors that they write become data."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampcheck.ops.traits import traits
from ampcheck.shadow.call import floating_values, written_by
from ampcheck.shadow.companions import CompanionStore
from ampcheck.torchtools.modes import DispatchMode, in_this_thread
from ampcheck.torchtools.private import NO_DISPATCH, OpOverload, mode_stack, without_modes
from ampcheck.torchtools.threads import Function, wrapped_threads

OTHER_THREADS = "ops of other threads"
OTHER_INFINITIES = "ops of other threads that made an infinity or a NaN of finite values"


class OtherThread(DispatchMode):
    """Counts the ops of another thread until `ended` is set, and forgets the companions of what they write."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A thread may outlive the block, and compiles then as without the mode."""
        return True

    def __init__(self, store: CompanionStore, counts: Counter[str], ended: threading.Event) -> None:
        super().__init__()
        self._store, self._counts, self._ended = store, counts, ended

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(t.__torch_dispatch__ is not NO_DISPATCH for t in types or ()):
            return NotImplemented
        if self._ended.is_set() or not isinstance(func, OpOverload) or traits(func).view:
            return func(*args, **kwargs)
        inputs = floating_values((args, tuple(kwargs.values())))
        infinite = any(isinstance(value, float) and not math.isfinite(value) for value in (*args, *kwargs.values()))
        finite = not infinite and all(map(_is_finite, inputs))  # before the op, which may overwrite them
        out = func(*args, **kwargs)
        values = [*inputs, *floating_values(out)]
        if values and not self._ended.is_set():
            self._counts[OTHER_THREADS] += 1
            if finite and not all(map(_is_finite, values)):
                self._counts[OTHER_INFINITIES] += 1
            for tensor in floating_values(written_by(traits(func), args, kwargs)):
                self._store.forget(tensor)
        return out


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values of a dense tensor are finite; of others they are not looked at."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype.itemsize == 1:
        return True
    with without_modes():
        return bool(tensor.isfinite().all())


@contextmanager
def watched_threads(shadow: DispatchMode, store: CompanionStore, counts: Counter[str]) -> Iterator[None]:
    """Count the ops of threads that are started inside, also by such threads, into `counts`."""
    ended = threading.Event()

    def followed(run: Function) -> Function:
        @functools.wraps(run)
        def follow(*args: object, **kwargs: object) -> object:
            with in_this_thread(OtherThread(store, counts, ended)):
                return run(*args, **kwargs)

        return follow

    def follows() -> bool:
        stack = mode_stack()
        return not ended.is_set() and any(mode is shadow or isinstance(mode, OtherThread) for mode in stack)

    try:
        with wrapped_threads(followed, follows):
            yield
    finally:
        ended.set()
