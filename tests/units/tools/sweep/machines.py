"""Workers that can be lost: a scheduler of Dask with two processes on this machine, and what runs on any executor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ampcheck.core.settings import Target
from ampcheck.tools.sweep.results import AUDIT, Task

STUB = """
import os
import signal
import time

from ampcheck.core.run import Coverage, Run


def audit(target, scratch):
    name = target["target"].partition(":")[2]
    first = not os.path.exists(name)
    with open(name, "a") as log:
        log.write(".")
    if name == "kills" or (name == "kills_once" and first):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if name == "preempted_once" and first:
        os.kill(os.getppid(), signal.SIGUSR2)
        time.sleep(60)
    if name.startswith("waits"):
        with open("waiting", "a") as log:
            log.write(f"{os.getpid()} ")
        for _ in range(600):
            if os.path.exists("go"):
                break
            time.sleep(0.1)
    return Run(coverage=Coverage({"ops": 1}), title=f"audit of {name}"), ""
"""
"""The commands of a worker without torch: `kills` ends the process that has started it, `waits` waits for `go`."""


def tasks(folder: Path, *names: str) -> list[Task]:
    """Tasks for `commands="stub"` in a folder."""
    (folder / "stub.py").write_text(STUB)
    return [Task(AUDIT, Target(f"stub.py:{name}")) for name in names]


@contextmanager
def dask_workers(folder: Path, count: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The `HOST:PORT` of a scheduler that gives no task to a second worker, and its worker processes."""
    scheduler = _start(folder, "dask_scheduler", "--host", "127.0.0.1", "--port", "0")
    try:
        contact, deadline = folder / _CONTACT, time.monotonic() + 60
        while not contact.exists():
            assert time.monotonic() < deadline, (folder / "dask.log").read_text()
            time.sleep(0.05)
        with more_workers(folder, count) as workers:
            yield json.loads(contact.read_text())["address"].removeprefix("tcp://"), workers
    finally:
        scheduler.kill()
        scheduler.wait()


@contextmanager
def more_workers(folder: Path, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of workers, each of one thread."""
    options = ("--host", "127.0.0.1", "--no-nanny", "--nthreads", "1")
    workers = [_start(folder, "dask_worker", *options) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


_CONTACT = "scheduler.json"


def _start(folder: Path, module: str, *options: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    command = [sys.executable, "-m", f"distributed.cli.{module}", "--scheduler-file", _CONTACT, "--no-dashboard"]
    with (folder / "dask.log").open("ab") as log:
        return subprocess.Popen([*command, *options], cwd=folder, env=env, stdout=log, stderr=log)
