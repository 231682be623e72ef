"""Work on many items, each in a process of its own, several at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    results: queue.SimpleQueue[tuple[_Item, Any, BaseException | None]] = queue.SimpleQueue()

    def start(module: str, **settings: Any) -> Worker:
        with lock:
            if stopped.is_set():
                raise InterruptedError
            worker = Worker(module, **settings)
            running[:] = [other for other in running if not other.closed] + [worker]
            return worker

    def run(item: _Item) -> None:
        try:
            results.put((item, work(item, start), None))
        except BaseException as error:  # noqa: BLE001  # raised where the results are read
            results.put((item, None, error))

    items = list(items)
    pool = ThreadPoolExecutor(jobs)
    try:
        for item in items:
            pool.submit(run, item)
        for _ in items:
            item, result, error = results.get()
            if error is not None:
                raise error
            yield item, result
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        with lock:
            for worker in running:
                worker.kill()
        pool.shutdown()
