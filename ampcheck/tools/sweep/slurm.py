"""The audits of a sweep as an array of jobs of Slurm, through submitit."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import submitit

from ampcheck.core.errors import UsageError, brief

_T = TypeVar("_T")

_ARRAY = 1_000
"""Jobs of one array; Slurm takes as many by default (`MaxArraySize`)."""

_POLL = 0.2
"""Seconds between looks for results; submitit itself asks Slurm once a minute."""

_MARGIN = 5
"""Minutes that a job has beyond those of its audit."""


class ArrayExecutor(Executor):
    """Calls that are submitted together become one array of jobs, which Slurm requeues where they are preempted.

    folder: for scripts, logs and results, on a file system that the nodes share. jobs: that run at the same time, None
    for as many as Slurm runs. seconds: that a call may take. limits: `LIMIT=VALUE` as of `sbatch`, with `_` for `-`;
    `cluster=local` runs processes on this machine instead, one at a time by default. Raises `UsageError` for a limit
    that submitit does not know, and without Slurm.
    """

    def __init__(self, folder: Path, jobs: int | None, seconds: float, limits: Sequence[str]) -> None:
        values: dict[str, str | int] = {}
        for limit in limits:
            name, _, text = (part.strip() for part in limit.partition("="))
            if not text:
                raise UsageError(f"--slurm takes LIMIT=VALUE, such as partition=gpu; found {limit}")
            values[name] = int(text) if text.isdigit() else text
        cluster = str(values.pop("cluster", "slurm"))
        self._most = _ARRAY if cluster == "slurm" else jobs or 1
        values = {"array_parallelism": jobs or _ARRAY, **values}
        minutes = math.ceil(seconds / 60) + _MARGIN
        try:
            self._jobs = submitit.AutoExecutor(folder, cluster=cluster)
            named = {f"slurm_{name}": value for name, value in values.items()}
            self._jobs.update_parameters(timeout_min=minutes, name="ampcheck", **named)
        except (RuntimeError, NameError, ValueError, TypeError, AssertionError, OSError) as error:
            raise UsageError(
                f"--executor slurm needs a cluster and limits that submitit knows: {brief(error)}"
            ) from error
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._running: dict[Future[Any], submitit.Job[Any]] = {}
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Submit a call, in an array with all others that wait."""
        future: Future[_T] = Future()
        self._waiting.append((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel all jobs that have not ended."""
        self._stop.set()
        self._watcher.join()
        for job in {_array(job): job for job in self._running.values()}.values():
            whole = submitit.SlurmJob(self._jobs.folder, _array(job)) if isinstance(job, submitit.SlurmJob) else job
            whole.cancel(check=False)
        self._running.clear()

    def _watch(self) -> None:
        while not self._stop.wait(_POLL):
            for future in [future for future, job in self._running.items() if job.done()]:
                # submitit waits for a result that a lost job never writes.
                threading.Thread(target=_collect, args=(future, self._running.pop(future)), daemon=True).start()
            room = self._most - len(self._running)
            if self._waiting and room >= max(self._most // 10, 1):  # of a long list no array is small
                batch = self._waiting[:room]
                del self._waiting[: len(batch)]  # calls are submitted meanwhile
                self._start([(future, call) for future, call in batch if future.set_running_or_notify_cancel()])

    def _start(self, batch: list[tuple[Future[Any], Callable[[], Any]]]) -> None:
        try:
            with self._jobs.batch():
                jobs = [self._jobs.submit(call) for _, call in batch]
        except Exception as error:  # noqa: BLE001  # sbatch refuses the limits, or does not answer
            for future, _ in batch:
                future.set_exception(UsageError(f"--executor slurm cannot submit jobs: {brief(error)}"))
            return
        self._running.update(zip((future for future, _ in batch), jobs, strict=True))


def _array(job: submitit.Job[Any]) -> str:
    return job.job_id.partition("_")[0]


def _collect(future: Future[Any], job: submitit.Job[Any]) -> None:
    try:
        future.set_result(job.result())
    except Exception:  # noqa: BLE001  # submitit's own text is the whole log
        log = job.paths.stderr
        future.set_exception(RuntimeError(f"job {job.job_id} ended in state {job.state} without a result; see {log}"))
