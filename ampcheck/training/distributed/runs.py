"""The runs of all ranks as one: each finding once."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Table
from ampcheck.training.distributed.ranks import gather_on_first, name_ranks, world_size

_GROUPS = itertools.count()

Titled = TypeVar("Titled", Table, Chart)


def gather_runs(run: Run) -> Run | None:
    """The runs of all ranks as one: on rank 0 the whole, on all others None. Every rank must call it.

    Findings with the same key appear once, with the message of the rank whose observation is the largest; those of some
    ranks name them. In one process the run itself is returned. Under torchrun, where the program has set up no process
    group, one is created for the moment.
    """
    with _group():
        if world_size() == 1:
            return run
        runs = gather_on_first(run.to_json())
        return None if runs is None else merge_ranks([Run.from_json(data) for data in runs])


@contextmanager
def _group() -> Iterator[None]:
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
    """How bad an observation is; NaN is the worst."""
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
