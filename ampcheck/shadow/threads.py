"""Other threads: their floating ops are counted and not followed; the tensors that they write become data."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampcheck.facts.values import CompanionStore
from ampcheck.records.numerics import OTHER_INFINITIES, OTHER_THREADS
from ampcheck.shadow.call import floating_values
from ampcheck.stream.ops import OpEvent, OpSubscriber, leaves, subscribed_here, subscribers_here
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.threads import Function, wrapped_threads


class OtherThread(OpSubscriber):
    """Counts the ops of another thread until `ended` is set, and forgets the companions of what they write."""

    compiles = True  # a thread may outlive the block, and compiles then as without it

    def __init__(self, store: CompanionStore, counts: Counter[str], ended: threading.Event) -> None:
        self._store, self._counts, self._ended = store, counts, ended

    def see(self, event: OpEvent) -> Any:
        """Count an op."""
        if event.wrapped:
            return NotImplemented
        if self._ended.is_set() or event.higher or event.traits.view:
            return event.run()
        inputs = floating_values(event.tensors)
        numbers = (*event.args, *event.kwargs.values())
        infinite = any(isinstance(value, float) and not math.isfinite(value) for value in numbers)
        finite = not infinite and all(map(_is_finite, inputs))  # before the op, which may overwrite them
        out = event.run()
        values = [*inputs, *floating_values(out)]
        if self._ended.is_set():
            return out
        copies = event.traits.copies is not None and len({t.dtype for t in (*event.tensors, *leaves(out))}) == 1
        if values and not copies:  # which are exact
            self._counts[OTHER_THREADS] += 1
            if finite and not all(map(_is_finite, values)):
                self._counts[OTHER_INFINITIES] += 1
        for tensor in floating_values(event.written_values()):
            self._store.forget(tensor)
        return out


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values of a dense tensor are finite; of others they are not looked at."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype.itemsize == 1:
        return True
    with without_modes():
        return bool(tensor.isfinite().all())


@contextmanager
def watched_threads(shadow: OpSubscriber, store: CompanionStore, counts: Counter[str]) -> Iterator[None]:
    """Count the ops of threads that are started inside, also by such threads, into `counts`."""
    ended = threading.Event()

    def followed(run: Function) -> Function:
        return subscribed_here(OtherThread(store, counts, ended))(run)

    def follows() -> bool:
        return not ended.is_set() and any(s is shadow or isinstance(s, OtherThread) for s in subscribers_here())

    try:
        with wrapped_threads(followed, follows):
            yield
    finally:
        ended.set()
