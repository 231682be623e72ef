"""The tasks of a sweep: those of which a folder has no result, each in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from functools import partial
from tempfile import TemporaryDirectory

from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.core.subject import name_of_target
from ampcheck.core.worker import Worker, WorkerEndedError
from ampcheck.tools.sweep.pool import Start, each
from ampcheck.tools.sweep.results import CRASHED, JUDGED, REFUSED, Allowance, Result, ResultFolder, Task

_CHILD = "ampcheck.tools.sweep.child_process"


def sweep(
    tasks: Sequence[Task], folder: ResultFolder, allowance: Allowance, *, jobs: int = 1, fresh: bool = False
) -> Generator[Result, None, None]:
    """The result of each task, at first those that the folder has, if they were judged; others are written to it.

    allowance: of each task. jobs: tasks at the same time, which share the cores. fresh: run every task again.
    Whatever a target does to its process, its result is a run with the reason. Raises `UsageError` for a result that
    cannot be written.
    """
    missing: list[Task] = []
    for task in tasks:
        known = None if fresh else folder.load(task)
        if known is None:
            missing.append(task)
        else:
            yield known
    for task, result in each(missing, partial(_run, allowance=allowance, jobs=jobs), jobs=jobs):
        folder.save(task, result)
        yield result


def _run(task: Task, start: Start, allowance: Allowance, jobs: int) -> Result:
    threads = str(max((os.cpu_count() or 1) // jobs, 1))
    env = {name: os.environ.get(name, threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    name = name_of_target(task.target.target)
    begin = time.perf_counter()
    with (
        TemporaryDirectory(prefix="ampcheck-", ignore_cleanup_errors=True) as scratch,
        start(_CHILD, name=name, env=env, memory=allowance.memory) as worker,
    ):
        run, ended, reason = judge(worker, name, task, allowance, scratch=scratch)
        seconds, peak = time.perf_counter() - begin, worker.peak
        worker.kill()  # PyTorch's own end takes seconds
    return Result(task.command, task.target.target, run, ended, reason, round(seconds, 1), peak)


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
