"""Threads that are started, and work that is submitted to pools of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

from ampcheck.torchtools.patching import replaced

Function = Callable[..., object]


@contextmanager
def wrapped_threads(wrap: Callable[[Function], Function], follows: Callable[[], bool]) -> Iterator[None]:
    """Wrap with `wrap` every function that is started in another thread while `follows()` is true."""

    def make_start(original: Function) -> Function:
        def start(self: threading.Thread) -> None:
            module = getattr(getattr(self, "_target", None), "__module__", "")
            if follows() and module not in ("concurrent.futures.thread", "multiprocessing.pool"):  # a pool's worker
                self.run = wrap(self.run)  # type: ignore[method-assign,assignment]
            original(self)

        return start

    def make_submit(pool: type) -> Callable[[Function], Function]:
        def make(original: Function) -> Function:
            def submit(self: object, *args: Any, **kwargs: Any) -> object:
                if follows() and isinstance(self, pool):
                    if args:
                        args = wrap(args[0]), *args[1:]
                    elif "func" in kwargs:  # of a pool, which takes it by name too
                        kwargs["func"] = wrap(kwargs["func"])
                return original(self, *args, **kwargs)

            return submit

        return make

    with ExitStack() as stack:
        stack.enter_context(replaced(threading.Thread, "start", make_start))
        stack.enter_context(replaced(ThreadPoolExecutor, "submit", make_submit(ThreadPoolExecutor)))
        for name in ("apply_async", "_map_async", "imap", "imap_unordered"):  # all others call one of these
            stack.enter_context(replaced(Pool, name, make_submit(ThreadPool)))
        yield
