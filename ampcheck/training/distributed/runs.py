"""One run of many: the findings of all ranks, each told once."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Table
from ampcheck.training.distributed.ranks import name_ranks, side_group, world_size

_GROUPS = itertools.count()
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")

Titled = TypeVar("Titled", Table, Chart)


def gather_runs(run: Run) -> Run | None:
    """The runs of all ranks as one: on rank 0 the whole, on all others None. Every rank must call it.

    What all ranks found appears once; what some found names them. Findings that differ in their numbers alone are one,
    with the numbers of the rank whose observation is the largest. In one process the run is given back as it is. Under
    torchrun, where the program has set up no process group, one is made for the moment.
    """
    with _group():
        ranks = world_size()
        if ranks == 1:
            return run
        found: list[Any] | None = [None] * ranks if dist.get_rank() == 0 else None
        dist.gather_object(run.to_json(), found, group=side_group())
        return merge_ranks([Run.from_json(one) for one in found]) if found is not None else None


@contextmanager
def _group() -> Iterator[None]:
    launched = dist.is_available() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not launched or dist.is_initialized():
        yield
        return
    from torch.distributed.distributed_c10d import PrefixStore  # a build without torch.distributed has none
    from torch.distributed.rendezvous import rendezvous

    store, rank, ranks = next(rendezvous("env://"))
    # Names of its own: what an earlier group left in torchrun's store would make this one wait for dead processes.
    store = PrefixStore(f"ampcheck-runs-{next(_GROUPS)}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def merge_ranks(runs: list[Run]) -> Run:
    """The runs of ranks 0, 1, ... as one; see `gather_runs`."""
    first = runs[0]
    return Run(
        _environment(runs),
        tuple(_findings(runs)),
        sum((run.coverage for run in runs), Coverage()),
        tuple(_titled([run.tables for run in runs])),
        tuple(_titled([run.charts for run in runs])),
        first.title,
    )


def _environment(runs: list[Run]) -> dict[str, Scalar]:
    told: dict[str, Scalar] = {**runs[0].environment, "ranks": len(runs)}
    for place, run in enumerate(runs[1:], start=1):
        for key, value in run.environment.items():
            if value != runs[0].environment.get(key):
                told[f"{key} (rank {place})"] = value
    return told


def _findings(runs: list[Run]) -> Iterator[Finding]:
    groups: dict[tuple[object, ...], list[tuple[int, Finding]]] = {}
    for rank, run in enumerate(runs):
        counts: dict[tuple[object, ...], int] = {}
        for one in run.findings:
            same = (one.check, one.verdict, one.subject, one.where, _NUMBER.sub("#", one.message), one.hint)
            counts[same] = counts.get(same, 0) + 1  # a rank may have two of a kind
            groups.setdefault((*same, counts[same]), []).append((rank, one))
    for group in groups.values():
        rank, worst = max(group, key=lambda pair: (_size(pair[1]), -pair[0]))
        ranks = tuple(place for place, _ in group)
        everywhere = len(ranks) == len(runs)
        equal = all(one.message == worst.message for _, one in group)
        if everywhere and equal:
            yield worst
        else:
            told = f"all {len(runs)} ranks" if everywhere else name_ranks(ranks)
            whose = "" if equal else f"; the numbers are those of rank {rank}"
            yield replace(worst, message=f"{worst.message} [on {told}{whose}]")


def _size(one: Finding) -> float:
    """How bad an observation is; NaN is the worst."""
    if one.observed is None:
        return 0.0
    return abs(one.observed) if one.observed == one.observed else float("inf")


def _titled(ranks: list[tuple[Titled, ...]]) -> Iterator[Titled]:
    """Tables or charts: once where they are the same on several ranks, else each under the ranks' numbers."""
    groups: dict[str, list[tuple[list[int], Titled]]] = {}
    for rank, shown in enumerate(ranks):
        for one in shown:
            alike = groups.setdefault(one.title, [])
            known = next((places for places, other in alike if other == one), None)
            if known is None:
                alike.append(([rank], one))
            else:
                known.append(rank)
    for title, alike in groups.items():
        for places, one in alike:
            unique = tuple(dict.fromkeys(places))
            yield one if len(unique) == len(ranks) else replace(one, title=f"{title} ({name_ranks(unique)})")


__all__ = ["gather_runs", "merge_ranks"]
