"""Work on many items, each in a process of its own, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from ampcheck.core.worker import Worker

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Start = Callable[..., Worker]
"""Starts a `Worker`, with its arguments."""


def each(
    items: Iterable[_Item], work: Callable[[_Item, Start], _Result], *, jobs: int
) -> Iterator[tuple[_Item, _Result]]:
    """Each item with its result, as the results come.

    work: called in a thread with an item and the function that starts its worker. Where the iteration ends early, as
    with Ctrl-C, all workers are killed. An exception of `work` ends the iteration.
    """
    running: list[Worker] = []
    lock, stopped = threading.Lock(), threading.Event()

    def start(module: str, **settings: Any) -> Worker:
        with lock:
            if stopped.is_set():
                raise InterruptedError
            worker = Worker(module, **settings)
            running[:] = [other for other in running if not other.closed] + [worker]
            return worker

    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = {pool.submit(work, item, start): item for item in items}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        with lock:
            for worker in running:
                worker.kill()
        pool.shutdown()
