"""What one rank raises is told to all: who goes on alone waits in collectives that no other takes part in.

A rank that raises after the last collective of a step, or where the others take part in none, costs nothing. One that
raises before a collective leaves the others in it until the timeout of the loop's group is over
(`init_process_group(timeout=...)`, 30 minutes by default on gloo): nothing can call them back, and the group is lost.
Then `LostRanksError` ends the audit, with the rank that raised. NCCL ends such a process itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from ampcheck.core.errors import brief
from ampcheck.core.run import Finding, Run, Verdict, Where
from ampcheck.training.distributed.ranks import gather, rank, side_group, world_size
from ampcheck.training.loop import StepError

_FAILED = re.compile(
    r"\bDist\w*Error: |"
    r"\bRuntimeError: .*(?:gloo|nccl|pair closure|connection (?:closed|reset)|timed out waiting|broken pipe)",
    re.IGNORECASE,
)

_WORST = ("memory", "raised", "value")


class LostRanksError(Exception):
    """A collective of the loop failed, and with it the group. The message names the rank that did not take part.

    error: what it raised; where no rank raised anything else, how the collective failed.
    """

    def __init__(self, message: str, error: StepError | None = None) -> None:
        super().__init__(message)
        self.error = error


def lost(told: str) -> bool:
    """Whether an exception, told by its type and its first line, is of a collective that did not come to its end."""
    return _FAILED.search(told) is not None


def settled(taken: float | StepError) -> float | StepError:
    """What a step gave on this rank, or the error in which it ended on any: on all ranks an error of one kind, or none.

    Every rank must call it after each step. Raises `LostRanksError` where a rank waited for others in vain.
    """
    if world_size() == 1:
        return taken
    mine = taken if isinstance(taken, StepError) else None
    try:
        told = gather(None if mine is None else (mine, lost(mine.message)))
    except (RuntimeError, dist.DistError) as error:  # a process that ended
        text = f"rank {rank()} heard no more of the others: {error!s:.120}"
        raise LostRanksError(text, mine) from error
    errors: list[tuple[int, StepError, bool]] = [(place, *one) for place, one in enumerate(told) if one is not None]
    if not errors:
        return taken
    failed = [(place, one) for place, one, broken in errors if broken]
    if failed:
        place, worst = next(((place, one) for place, one, broken in errors if not broken), failed[0])
        waited = [f"; rank {who} waited for it: {one.message}" for who, one in failed if who != place]
        text = f"{_when(worst)}rank {place} raised {worst.message}{waited[0] if waited else ''}"
        raise LostRanksError(text, worst)
    kind = min((one.kind for _, one, _ in errors), key=_WORST.index)
    if mine is not None and mine.kind == kind:
        return mine
    place, worst = next((place, one) for place, one, _ in errors if one.kind == kind)
    return replace(worst, message=f"on rank {place}, {worst.message}", rank=place)


@contextmanager
def ending_alike(runs: list[Run], subject: str, checks: Collection[str]) -> Iterator[None]:
    """Of several ranks that lose each other in what is judged here, add the run that tells it to `runs`.

    checks: what was to be judged; those that no run tells of yet are skipped. Every rank must enter it.
    """
    if world_size() > 1:
        side_group()  # made before any rank can be kept waiting
    try:
        yield
    except Exception as error:
        if world_size() == 1 or not (isinstance(error, LostRanksError) or lost(brief(error))):
            raise
        runs.append(_ended(error, subject, set(checks) - {one.check for run in runs for one in run.findings}))


def _ended(error: Exception, subject: str, left: Collection[str]) -> Run:
    cause = error.error if isinstance(error, LostRanksError) else None
    told = str(error) if isinstance(error, LostRanksError) else f"rank {rank()} waited in vain: {brief(error)}"
    where = Where() if cause is None or cause.step < 0 else Where(file=cause.file, line=cause.line, step=cause.step)
    message = f"all ranks must take part in every collective of a step; {told}"
    hint = "let no rank raise or return where the others wait for it; what comes after was not looked at"
    found = [Finding("coverage", Verdict.FAIL, subject, message, where, hint=hint)]
    text = "not judged: the ranks lost each other, see coverage"
    return Run(findings=(*found, *(Finding(slug, Verdict.SKIP, subject, text) for slug in sorted(left))))


def _when(error: StepError) -> str:
    return f"step {error.step}: " if error.step >= 0 else ""


__all__ = ["LostRanksError", "ending_alike", "lost", "settled"]
