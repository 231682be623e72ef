"""Where the audits of a sweep run: executors as of `concurrent.futures`, here or on other machines."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.subject import load_attribute
from ampcheck.core.worker import Worker
from ampcheck.report.progress import say

_T = TypeVar("_T")

Start = Callable[..., Worker]
"""Starts a `Worker`, with its arguments."""

Opening = Callable[[], AbstractContextManager[Executor]]
"""Opens an executor, for calls that can be pickled; `shutdown(wait=False)` ends those that it can end."""

_CONNECT = 5
"""Seconds in which a scheduler must answer."""

_PATIENCE, _LOOK = 300.0, 1.0
"""Seconds for which calls wait for a scheduler without workers, which may be about to start some; between looks."""


def opening(spec: str, *, jobs: int | None, seconds: float, limits: Sequence[str], folder: Path) -> Opening:
    """Return what opens the executor that `--executor` names. Raises `UsageError` for a name of another form.

    jobs: audits at the same time, None for the default. seconds: that a call may take. limits: `LIMIT=VALUE` of
    Slurm. folder: for the files of its jobs.
    """
    scheme, slashes, address = spec.partition("://")
    if spec == "local" and not limits:
        return partial(LocalPool, jobs or 1)
    if spec == "slurm":
        try:
            from ampcheck.tools.sweep.slurm import ArrayExecutor
        except ImportError as error:
            raise UsageError("--executor slurm needs submitit: pip install 'ampcheck[slurm]'") from error
        return partial(ArrayExecutor, folder, jobs, seconds, limits)
    if limits:
        raise UsageError(f"--slurm {limits[0]} is of --executor slurm: add it, or leave --slurm out")
    if jobs is not None:
        raise UsageError(
            f"--jobs is of --executor local and slurm; {spec} itself has a number of workers: leave it out"
        )
    if scheme == "dask" and re.fullmatch(r".+:\d{1,5}", address):
        return partial(_dask, address)
    if ":" in spec and not slashes:
        return partial(_own, spec)
    raise UsageError(
        "--executor must be local, slurm, dask://HOST:PORT, or package.module:factory, which returns a "
        f"concurrent.futures.Executor; found {spec!r}"
    )


class LocalPool(ThreadPoolExecutor):
    """Threads of this process, which share the cores; `shutdown` kills the workers that their calls have started."""

    def __init__(self, jobs: int = 1) -> None:
        super().__init__(jobs)
        threads = str(max((os.cpu_count() or 1) // jobs, 1))
        self._env = {name: os.environ.get(name, threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._running: list[Worker] = []
        self._gate, self._stopped = threading.Lock(), False

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Call `fn` in a thread, with `start=`, the function that starts its worker."""
        return super().submit(fn, *args, start=self._start, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all calls, at once."""
        with self._gate:
            self._stopped = True
            for worker in self._running:
                worker.kill()
        super().shutdown(cancel_futures=True)

    def _start(self, module: str, **settings: Any) -> Worker:
        with self._gate:
            if self._stopped:
                raise InterruptedError
            worker = Worker(module, env=self._env, **settings)
            self._running[:] = [other for other in self._running if not other.closed] + [worker]
            return worker


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError("--executor dask://HOST:PORT needs dask.distributed: pip install 'ampcheck[dask]'") from error
    try:
        client = Client(f"tcp://{address}", timeout=_CONNECT, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--executor dask://{address} needs a scheduler there, as `dask scheduler` starts one: {brief(error)}"
        ) from error
    with client:
        if not client.nthreads():  # type: ignore[no-untyped-call]
            say(f"the scheduler {address} has no worker yet; the audits wait {_PATIENCE:g} s for one")
        try:
            client.wait_for_workers(1, timeout=_PATIENCE)
        except TimeoutError as error:
            text = f"has no worker: start one, as `dask worker tcp://{address}` does"
            raise UsageError(f"the scheduler of --executor dask://{address} {text}") from error
        executor: Executor = client.get_executor()  # type: ignore[no-untyped-call]
        threading.Thread(target=_watch, args=(client, executor), daemon=True).start()
        yield executor


def _watch(client: Any, executor: Executor) -> None:
    """Lose all calls where the scheduler has no worker for long."""
    seen = time.monotonic()
    while client.status == "running" and time.monotonic() - seen < _PATIENCE:
        time.sleep(_LOOK)
        with suppress(Exception):  # its connection may have ended
            seen = time.monotonic() if client.nthreads() else seen
    executor.shutdown(wait=False)


def _own(factory: str) -> Executor:
    function = load_attribute(factory)
    try:
        executor = function()
    except BaseException as error:  # the user's code may raise anything
        raise UsageError(f"--executor {factory} raised {brief(as_result(error))}") from error
    if isinstance(executor, Executor):
        return executor
    found = type(executor).__name__
    raise UsageError(f"--executor {factory} must return a concurrent.futures.Executor; found {found}")
