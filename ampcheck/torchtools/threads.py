"""Threads that are started, and work that is submitted to pools of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

from ampcheck.torchtools.patching import observed, replaced

Function = Callable[..., object]


@contextmanager
def wrapped_threads(wrap: Callable[[Function], Function], follows: Callable[[], bool]) -> Iterator[None]:
    """Wrap with `wrap` every function that is started in another thread while `follows()` is true."""

    def start(thread: threading.Thread) -> None:
        module = getattr(getattr(thread, "_target", None), "__module__", "")
        if follows() and module not in ("concurrent.futures.thread", "multiprocessing.pool"):  # a pool's worker
            thread.run = wrap(thread.run)  # type: ignore[method-assign,assignment]

    def make_submit(pool: type, original: Function) -> Function:
        def submit(self: object, *args: Any, **kwargs: Any) -> object:
            if follows() and isinstance(self, pool):
                if args:
                    args = wrap(args[0]), *args[1:]
                elif "func" in kwargs:  # of a pool, which takes it by name too
                    kwargs["func"] = wrap(kwargs["func"])
            return original(self, *args, **kwargs)

        return submit

    with ExitStack() as stack:
        stack.enter_context(observed(threading.Thread, "start", start))
        stack.enter_context(replaced(ThreadPoolExecutor, "submit", partial(make_submit, ThreadPoolExecutor)))
        for name in ("apply_async", "_map_async", "imap", "imap_unordered"):  # all others call one of these
            stack.enter_context(replaced(Pool, name, partial(make_submit, ThreadPool)))
        yield
