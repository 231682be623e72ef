"""What a sweep costs per target beside the audit: local, by Dask, by submitit; and what an end in its middle costs.

    nice -n 19 python benchmarks/sweep_machines.py --json reports/evidence/sweep_machines.json
    nice -n 19 python benchmarks/sweep_machines.py --only dask submitit --targets 300 --json new.json

A target is a process of Python that imports no torch and returns a small run, one at a time, so that a sweep is little
else than what it costs. "in turn" calls each without an executor, result folder or resumption; the overhead is what a
target takes beyond that. Rows of other arms and sizes stay as they are.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from _evidence import Row, is_current, markdown_table, read_rows, write_rows

from ampcheck.core.worker import Worker
from ampcheck.speed.paired import fingerprint
from ampcheck.tools.sweep.executors import opening
from ampcheck.tools.sweep.results import Allowance, Result, ResultFolder
from ampcheck.tools.sweep.sweep import Call, run_call, sweep

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "units" / "tools" / "sweep"))
from machines import dask_workers, tasks  # noqa: E402  # of the tests

COLUMNS = ("name", "seconds", "cpu ms", "overhead ms", "scheduler ms", "starts", "judged", "resumed")

NOTES = """\
Per target, in processor time of the sweep and of all that it starts (wall time on a shared machine is that of others):
cpu ms; and overhead ms, what that is beyond "in turn", where each target is called without an executor and nothing is
kept. scheduler ms: of the scheduler of Dask alone. starts: audits that were begun. resumed: results that the second
sweep found, after the first was killed. In "dask, a worker lost" one of two workers is killed in the middle, under a
scheduler that itself tries nothing again."""


def names(count: int) -> list[str]:
    return [f"t{i}" for i in range(count)]


def starts(count: int) -> int:
    """How many audits were started, by the marks that they leave."""
    return sum(Path(name).stat().st_size for name in names(count) if Path(name).exists())


def swept(count: int, executor: str, each: Callable[[int], None] = lambda done: None, **limits: str) -> list[Result]:
    jobs = None if "://" in executor else 1
    folder = Path("slurm").absolute()
    opened = opening(
        executor, jobs=jobs, seconds=60, limits=[f"{name}={value}" for name, value in limits.items()], folder=folder
    )
    results = []
    for result in sweep(tasks(Path(), *names(count)), ResultFolder("results"), Allowance(60), opened, commands="stub"):
        results.append(result)
        each(len(results))
    return results


def in_turn(count: int) -> Row:
    calls = [Call(task, Allowance(60), os.getcwd(), {}, "stub") for task in tasks(Path(), *names(count))]
    return {"judged": sum(run_call(call, start=Worker)["ended"] == "judged" for call in calls)}


def local(count: int) -> Row:
    return {"judged": judged(swept(count, "local"))}


def submitit(count: int) -> Row:
    return {"judged": judged(swept(count, "slurm", cluster="local"))}


def dask(count: int) -> Row:
    with dask_workers(Path(), 1) as (address, _), scheduler_seconds() as used:
        results = swept(count, f"dask://{address}")
        return {"judged": judged(results), "scheduler ms": round(1000 * used() / count, 2)}


def dask_lost(count: int) -> Row:
    """Two workers, one of which is killed in the middle."""
    with dask_workers(Path(), 2) as (address, workers):

        def kill(done: int) -> None:
            if done == count // 2:
                workers[0].kill()

        return {"judged": judged(swept(count, f"dask://{address}", kill))}


def local_killed(count: int) -> Row:
    """A sweep that is killed in the middle, and the one that goes on; seconds are those of both."""
    command = [sys.executable, __file__, "--child", str(count)]
    first = subprocess.Popen(command)
    while len(list(Path("results").glob("stub*.json"))) < count // 2:
        assert first.poll() is None, "the sweep ended before its middle"
        time.sleep(0.05)
    first.kill()
    first.wait()
    kept = len(list(Path("results").glob("stub*.json")))
    return {"judged": judged(swept(count, "local")), "resumed": kept}


def judged(results: list[Result]) -> int:
    return sum(result.ended == "judged" for result in results)


@contextmanager
def scheduler_seconds() -> Iterator[Callable[[], float]]:
    """The processor time that the scheduler has used since, of a process of this one."""
    listing = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    (pid,) = (line.split()[0] for line in listing.stdout.splitlines() if "dask_scheduler" in line)

    def now() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    begin = now()
    yield lambda: now() - begin


ARMS: dict[str, Callable[[int], Row]] = {
    "in turn": in_turn,
    "local": local,
    "local, killed": local_killed,
    "dask": dask,
    "dask, a worker lost": dask_lost,
    "submitit": submitit,
}


def processor_seconds() -> float:
    """Of this process and of all below it that have ended."""
    return sum(map(sum, ((u.ru_utime, u.ru_stime) for u in map(resource.getrusage, (0, resource.RUSAGE_CHILDREN)))))


def measured(arm: str, count: int) -> Row:
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            begin, used = time.perf_counter(), processor_seconds()
            row = ARMS[arm](count)
            seconds, used = time.perf_counter() - begin, processor_seconds() - used
            cpu = round(1000 * used / count, 1)
            return {"seconds": round(seconds, 1), "cpu ms": cpu, "starts": starts(count), **row}
        finally:
            os.chdir(here)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--targets", type=int, default=1_000)
    parser.add_argument("--only", nargs="*", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        swept(options.child, "local")
        return
    known, size = fingerprint("cpu"), f"{options.targets:,} targets"
    rows = read_rows(options.json) if options.json else {}
    for arm in options.only:
        if (size, arm) in rows and is_current(rows[size, arm], {}, known):
            continue
        row = measured(arm, options.targets)
        rows[size, arm] = {"size": size, "name": arm, "options": {}, "fingerprint": known, **row}
        print(arm, row, flush=True)
    for (of, _), row in rows.items():
        base = rows.get((of, "in turn"))
        row["overhead ms"] = round(row["cpu ms"] - base["cpu ms"], 1) if base else None
    table = [
        line for size in dict.fromkeys(size for size, _ in rows) for line in ("", f"{size}:", "", *lines(rows, size))
    ]
    print(*table, sep="\n")
    if options.json:
        write_rows(options.json, rows, {}, [NOTES, *table])


def lines(rows: dict[tuple[str, str], Row], size: str) -> list[str]:
    held = [dict.fromkeys(COLUMNS) | rows[size, arm] for arm in ARMS if (size, arm) in rows]
    return markdown_table(held, COLUMNS)


if __name__ == "__main__":
    main()
