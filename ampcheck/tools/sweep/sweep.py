"""The tasks of a sweep: those of which a folder has no result, each in a process of its own."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Any

from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.run import Run
from ampcheck.core.subject import name_of_target
from ampcheck.core.text import listed
from ampcheck.core.worker import ENDED, Worker, WorkerEndedError
from ampcheck.tools.sweep.executors import LocalPool, Opening, Start
from ampcheck.tools.sweep.results import (
    CRASHED,
    JUDGED,
    REFUSED,
    Allowance,
    Result,
    ResultFolder,
    Task,
    changes,
    key_of,
)
from ampcheck.tools.sweep.source import CodeDigests

_CHILD = "ampcheck.tools.sweep.child_process"

_READERS = 16
"""Results that are read at the same time, which may be far away."""


def sweep(
    tasks: Sequence[Task],
    folder: ResultFolder,
    allowance: Allowance,
    executor: Opening = LocalPool,
    *,
    fresh: bool = False,
    begin: Callable[[], object] = tuple,
    commands: str = _CHILD,
) -> Generator[Result, None, None]:
    """The result of each task, at first those that the folder has, if they were judged; others are written to it.

    allowance: of each task. fresh: run every task again. begin: called when the executor is open, before anything is
    written. commands: the module that a worker serves. Whatever a target does to its process, its result is a run with
    the reason. A task whose executor fails, as with a lost machine, is tried once more. Raises `UsageError` for a
    result that cannot be written, and for an executor that cannot be opened.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        known = [None] * len(tasks) if fresh else list(readers.map(folder.load, tasks))
    missing = [task for task, result in zip(tasks, known, strict=True) if result is None]
    calls = [Call(task, allowance, os.getcwd(), folder.key(task), commands) for task in missing]
    with executor() if calls else nullcontext() as opened:
        begin()
        yield from (result for result in known if result is not None)
        with closing(_results(calls, opened, executor)) as results:
            for call, result in results:
                folder.save(call.task, result)
                yield result


@dataclass(frozen=True, eq=False)
class Call:
    """A task for any machine; it can be pickled.

    folder: in which the worker starts. key: of the result, which another machine must have as well: the same code, and
    the same versions. commands: the module that the worker serves.
    """

    task: Task
    allowance: Allowance
    folder: str
    key: Mapping[str, Any]
    commands: str

    def difference(self) -> str:
        """Why this machine would judge something else; or ""."""
        machine = f"the worker on {platform.node()}"
        if not os.path.isdir(self.folder):
            return f"{machine} has no folder {self.folder}: the machines must share it, or have a checkout at its place"
        here = key_of(self.task, CodeDigests(self.folder).of(self.task.target.target))
        if different := list(changes(here, self.key)):
            return f"{machine} must have the code and versions that the sweep was started with: {listed(different)}"
        return ""


def run_call(call: Call, *, start: Start | None = None) -> dict[str, Any]:
    """Run a task in a fresh process; the JSON of its `Result`. start: of the machine that made the call."""
    task, begin, peak = call.task, time.perf_counter(), None
    name = name_of_target(task.target.target)
    if start is None and (difference := call.difference()):
        run, ended, reason = unjudged(name, task.command, REFUSED, difference)
    else:
        with (
            TemporaryDirectory(prefix="ampcheck-", ignore_cleanup_errors=True) as scratch,
            (start or Worker)(call.commands, name=name, cwd=call.folder, memory=call.allowance.memory) as worker,
        ):
            run, ended, reason = judge(worker, name, task, call.allowance, scratch=scratch)
            peak = worker.peak
            worker.kill()  # PyTorch's own end takes seconds
    seconds = round(time.perf_counter() - begin, 1)
    return Result(task.command, task.target.target, run, ended, reason, seconds, peak).to_json()


def _results(
    calls: Sequence[Call], opened: Executor | None, executor: Opening
) -> Generator[tuple[Call, Result], None, None]:
    """The result of each call, as they come; those that are lost are tried once more when all others have ended.

    opened: for the first try. executor: opens one for each of the others.
    """
    lost: dict[Call, Exception] = {}

    def results(calls: Sequence[Call], executor: Opening) -> Generator[tuple[Call, Result], None, None]:
        with closing(_outcomes(calls, executor)) as outcomes:
            for call, outcome in outcomes:
                if isinstance(outcome, Result):
                    lost.pop(call, None)
                    yield call, outcome
                else:
                    lost[call] = outcome

    if opened is not None:
        yield from results(calls, lambda: nullcontext(opened))
    alone = [[call] for call, error in lost.items() if _takes_others_along(error)]
    try:
        for group in ([call for call, error in lost.items() if not _takes_others_along(error)], *alone):
            yield from results(group, executor)
    except UsageError as gone:  # no machine is left
        lost = dict.fromkeys(lost, gone)
    for call, error in lost.items():
        task, why = call.task, str(error) if isinstance(error, UsageError) else brief(error)
        reason = f"its worker was lost twice: {why}"
        run, ended, reason = unjudged(name_of_target(task.target.target), task.command, ENDED, reason)
        yield call, Result(task.command, task.target.target, run, ended, reason)


def _takes_others_along(error: Exception) -> bool:
    """Return whether calls are lost with the one that ended their worker: of a broken pool, and of a worker of Dask."""
    return isinstance(error, BrokenExecutor) or hasattr(error, "last_worker")


def _outcomes(calls: Sequence[Call], executor: Opening) -> Generator[tuple[Call, Result | Exception], None, None]:
    """The result of each call, as they come, or why it is lost."""
    if not calls:
        return
    futures: dict[Future[dict[str, Any]], Call] = {}
    with executor() as opened:
        try:
            for call in calls:
                try:
                    futures[opened.submit(run_call, call)] = call
                except Exception as error:  # noqa: BLE001, PERF203  # of a pool that an earlier call has broken
                    yield call, error
            for future in as_completed(futures):
                # Dask computes again what a lost worker held, for whoever still has the future.
                yield futures.pop(future), _outcome(future)
        finally:
            for future in futures:
                future.cancel()
            opened.shutdown(wait=False)


def _outcome(future: Future[dict[str, Any]]) -> Result | Exception:
    """The result, or why it is lost. Raises `UsageError` where the executor cannot work as it is."""
    try:
        return Result.from_json(future.result())
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  # each executor has its own
        return error


def judge(worker: Worker, name: str, task: Task, allowance: Allowance, **places: str) -> tuple[Run, str, str]:
    """The run of a task, how it ended, and why there is no other run.

    worker: has the command of the task, which takes the target and `places`. name: of the target in findings.
    """
    try:
        run, crash = worker.ask(task.command, timeout=allowance.seconds, target=asdict(task.target), **places)
        if run is not None:
            return run, JUDGED, ""
        ended, reason = CRASHED, f"a defect of ampcheck, please report it: {crash.strip()}"
    except WorkerEndedError as error:
        ended, reason = error.why, str(error)
    except UsageError as error:
        ended, reason = REFUSED, str(error)
    return unjudged(name, task.command, ended, reason)


def unjudged(name: str, command: str, ended: str, reason: str) -> tuple[Run, str, str]:
    """The run of a target that was not judged, how it ended, and why, in a line."""
    finding = COVERAGE.unjudged(name, f"not judged: {reason}")
    return Run(findings=(finding,), title=f"{command} of {name}"), ended, _brief(reason, ended)


def _brief(reason: str, ended: str) -> str:
    """The first line, or of a traceback the first clause and the last line."""
    lines = reason.splitlines()
    if ended == CRASHED:
        return f"{lines[0].partition(':')[0]}: {lines[-1]}"
    return lines[0].removesuffix("; it printed last:")
