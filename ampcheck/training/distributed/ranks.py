"""Communication between ranks, in a process group of its own, and what happens where the ranks lose each other.

A rank that raises after the last collective of a step, or where the others take part in none, costs nothing. One that
raises before a collective leaves the others in it until the timeout of the loop's group is over
(`init_process_group(timeout=...)`, 30 minutes by default on gloo): nothing can call them back, and the group is lost.
Then `LostRanksError` ends the audit, with the rank that raised. NCCL ends such a process itself.
"""

from __future__ import annotations

import itertools
import os
import re
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ampcheck.checks import REGISTRY
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.core.errors import brief
from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Table, Where
from ampcheck.records.protocol import StepError
from ampcheck.records.reductions import name_ranks
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.process_groups import process_rank

Value = TypeVar("Value")

_PATIENCE = timedelta(minutes=30)
"""Time for which ranks wait for each other here, beyond that of a collective of the loop: for what they compute
alone."""

_SIDE_GROUPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

_FAILED = re.compile(
    r"\bDist\w*Error: |"
    r"\bRuntimeError: .*(?:gloo|nccl|pair closure|connection (?:closed|reset)|timed out waiting|broken pipe)",
    re.IGNORECASE,
)

_GRAVEST_FIRST = ("memory", "raised", "value")

_GROUPS = itertools.count()

Titled = TypeVar("Titled", Table, Chart)


def world_size() -> int:
    """Return how many processes work together; 1 where no process group is set up."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


rank = process_rank


def side_group() -> Any:
    """A gloo group of all ranks for ampcheck's own messages; None, the group of the loop, where there can be none.

    A collective that fails closes its group, and a rank that still waits in one would take our message for its own. The
    first call on each rank creates the group.
    """
    whole = dist.group.WORLD
    if whole is None or not dist.is_gloo_available() or not re.search(r"\b(gloo|nccl)\b", dist.get_backend()):
        return None
    if whole not in _SIDE_GROUPS:
        timeout = timedelta()
        for kind in ("cpu", "cuda"):
            with suppress(RuntimeError, AttributeError):  # no backend for this kind of device, or another torch
                timeout = max(timeout, whole._get_backend(torch.device(kind)).options._timeout)  # no public name
        _SIDE_GROUPS[whole] = dist.new_group(backend="gloo", timeout=(timeout or timedelta(minutes=30)) + _PATIENCE)
    return _SIDE_GROUPS[whole]


def gather(value: Value) -> list[Value]:
    """The values of all processes, in order of rank. Every process must call it; the values must be picklable."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    with without_modes():  # a mode may be active while ranks agree on a step
        dist.all_gather_object(values, value, group=side_group())
    return values


def agreed(flag: bool) -> bool:
    """Return whether the flag is set on any process, so that all take the same decision. Every process must call it."""
    return any(gather(flag))


def earliest(step: int | None) -> int | None:
    """The first of a step on each rank; None where none has one."""
    return min((number for number in gather(step) if number is not None), default=None)


class LostRanksError(Exception):
    """A collective of the loop failed, and with it the group. The message names the rank that did not take part.

    error: what it raised; where no rank raised anything else, how the collective failed.
    """

    def __init__(self, message: str, error: StepError | None = None) -> None:
        super().__init__(message)
        self.error = error


def is_failed_collective(error: str) -> bool:
    """Return whether an exception, given by its type and first line, is of a collective that was not completed."""
    return _FAILED.search(error) is not None


def settled(result: float | StepError) -> float | StepError:
    """The result of a step on this rank, or the error in which it ended on any rank: all ranks get an error of one
    kind, or none.

    Every rank must call it after each step. Raises `LostRanksError` where a rank waited for others in vain.
    """
    if world_size() == 1:
        return result
    mine = result if isinstance(result, StepError) else None
    try:
        errors = [(number, error) for number, error in enumerate(gather(mine)) if error is not None]
    except (RuntimeError, dist.DistError) as error:  # a process that ended
        raise LostRanksError(f"rank {rank()} heard no more of the others: {error!s:.120}", mine) from error
    if not errors:
        return result
    failed = [(number, error) for number, error in errors if is_failed_collective(error.message)]
    if failed:
        number, cause = next((pair for pair in errors if pair not in failed), failed[0])
        waited = [f"; rank {who} waited for it: {error.message}" for who, error in failed if who != number]
        step = f"step {cause.step}: " if cause.step >= 0 else ""
        raise LostRanksError(f"{step}rank {number} raised {cause.message}{waited[0] if waited else ''}", cause)
    kind = min((error.kind for _, error in errors), key=_GRAVEST_FIRST.index)
    if mine is not None and mine.kind == kind:
        return mine
    number, cause = next((number, error) for number, error in errors if error.kind == kind)
    return replace(cause, message=f"on rank {number}, {cause.message}", rank=number)


@contextmanager
def ending_alike(runs: list[Run], subject: str, checks: Collection[str]) -> Iterator[None]:
    """Where the ranks lose each other inside, add the run that reports it to `runs`.

    checks: those that are judged; those without a finding yet are skipped. Every rank must enter it.
    """
    if world_size() > 1:
        side_group()  # created before any rank can be kept waiting
    try:
        yield
    except Exception as error:
        if world_size() == 1 or not (isinstance(error, LostRanksError) or is_failed_collective(brief(error))):
            raise
        left = set(checks) - {finding.check for run in runs for finding in run.findings}
        runs.append(_lost_ranks(error, subject, left))


def _lost_ranks(error: Exception, subject: str, left: Collection[str]) -> Run:
    cause = error.error if isinstance(error, LostRanksError) else None
    what = str(error) if isinstance(error, LostRanksError) else f"rank {rank()} waited in vain: {brief(error)}"
    where = Where() if cause is None or cause.step < 0 else Where(file=cause.file, line=cause.line, step=cause.step)
    message = f"all ranks must take part in every collective of a step; {what}"
    hint = "let no rank raise or return where the others wait for it; what comes after was not looked at"
    reason = "not judged: the ranks lost each other, see coverage"
    skipped = (REGISTRY[slug].skip(subject, reason) for slug in sorted(left))
    return Run(findings=(COVERAGE.fail(subject, message, where=where, hint=hint), *skipped))


def gather_runs(run: Run) -> Run | None:
    """The runs of all ranks as one: on rank 0 the whole, on all others None. Every rank must call it.

    Findings with the same key appear once, with the message of the rank whose observation is the largest; those of some
    ranks name them. In one process the run itself is returned. Under torchrun, where the program has set up no process
    group, one is created for the moment.
    """
    with grouped():
        if world_size() == 1:
            return run
        runs = gather(run.to_json())
        return merge_ranks([Run.from_json(data) for data in runs]) if rank() == 0 else None


@contextmanager
def grouped() -> Iterator[None]:
    """In a process group; in one of its own where the program of a rank has none, or has left it."""
    launched = dist.is_available() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not launched or dist.is_initialized():
        yield
        return
    from torch.distributed.distributed_c10d import PrefixStore  # a build without torch.distributed has none
    from torch.distributed.rendezvous import rendezvous

    store, rank, ranks = next(rendezvous("env://"))
    # Names of its own: keys of an earlier group in torchrun's store would make this one wait for dead processes.
    store = PrefixStore(f"ampcheck-runs-{next(_GROUPS)}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def merge_ranks(runs: list[Run]) -> Run:
    """The runs of ranks 0, 1, ... as one; see `gather_runs`."""
    return Run(
        _environment(runs),
        tuple(_findings(runs)),
        sum((run.coverage for run in runs), Coverage()),
        tuple(_titled([run.tables for run in runs])),
        tuple(_titled([run.charts for run in runs])),
        runs[0].title,
    )


def _environment(runs: list[Run]) -> dict[str, Scalar]:
    first = runs[0].environment
    others = {
        f"{key} (rank {rank})": value
        for rank, run in enumerate(runs[1:], start=1)
        for key, value in run.environment.items()
        if value != first.get(key)
    }
    return {**first, "ranks": len(runs), **others}


def _findings(runs: list[Run]) -> Iterator[Finding]:
    groups: dict[object, list[tuple[int, Finding]]] = {}
    for rank, run in enumerate(runs):
        counts: Counter[object] = Counter()
        for finding in run.findings:
            counts[finding.key] += 1  # a rank may have two with the same key
            groups.setdefault((finding.key, counts[finding.key]), []).append((rank, finding))
    for group in groups.values():
        rank, worst = max(group, key=lambda pair: (_size(pair[1]), -pair[0]))
        everywhere = len(group) == len(runs)
        equal = all(finding.message == worst.message for _, finding in group)
        if everywhere and equal:
            yield worst
        else:
            ranks = f"all {len(runs)} ranks" if everywhere else name_ranks([number for number, _ in group])
            whose = "" if equal else f"; the numbers are those of rank {rank}"
            yield replace(worst, message=f"{worst.message} [on {ranks}{whose}]")


def _size(finding: Finding) -> float:
    """Return how bad an observation is; NaN is the worst."""
    if finding.observed is None:
        return 0.0
    return abs(finding.observed) if finding.observed == finding.observed else float("inf")


def _titled(ranks: list[tuple[Titled, ...]]) -> Iterator[Titled]:
    """Tables or charts: once where they are the same on several ranks, else each with the numbers of its ranks."""
    groups: dict[str, list[tuple[set[int], Titled]]] = {}
    for rank, shown in enumerate(ranks):
        for item in shown:
            alike = groups.setdefault(item.title, [])
            known = next((numbers for numbers, other in alike if other == item), None)
            if known is None:
                alike.append(({rank}, item))
            else:
                known.add(rank)
    for title, alike in groups.items():
        for numbers, item in alike:
            everywhere = len(numbers) == len(ranks)
            yield item if everywhere else replace(item, title=f"{title} ({name_ranks(sorted(numbers))})")
