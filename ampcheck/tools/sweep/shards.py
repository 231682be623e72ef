"""Parts of a sweep for several machines, of about the same expected cost."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from statistics import median

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.core.subject import names_of_targets
from ampcheck.core.text import counted, is_number
from ampcheck.tools.sweep.listing import Entry

_GITHUB = 256
"""Jobs of one matrix, at most."""


def parse_shard(text: str) -> tuple[int, int]:
    """The number of a shard, from 1, and how many there are, of `k/n`. Raises `UsageError` for another text."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count:
        raise UsageError(f"--shard takes k/n, shard k of n from 1/n to n/n, such as 2/8; found {text!r}")
    return number, count


def costs_of(path: str, entries: Sequence[Entry]) -> dict[str, float]:
    """The seconds that each target took in an earlier sweep, by target; of one that it lacks, their median.

    path: of the run that `ampcheck sweep --json` or `ampcheck report` wrote. Raises `UsageError` where none is in it.
    """
    by_name: dict[str, float] = {}
    for table in Run.load(path).tables:
        if {"target", "seconds"} <= set(table.columns):
            name, seconds = table.columns.index("target"), table.columns.index("seconds")
            rows = [(str(row[name]), row[seconds]) for row in table.rows]
            by_name |= {target: float(cost) for target, cost in rows if is_number(cost) and 0 <= cost < math.inf}
    names = names_of_targets(entry.target for entry in entries)  # the earlier sweep may have had others beside them
    found = {target: by_name[key] for target, name in names.items() for key in (name, target) if key in by_name}
    if not found:
        raise UsageError(f"--costs needs the run of an earlier sweep of these targets; {path} has seconds of none")
    return {target: found.get(target, median(found.values())) for target in names}


def split(entries: Sequence[Entry], count: int, costs: Mapping[str, float]) -> list[list[Entry]]:
    """The targets of each shard, in their order: the costliest first, each to the shard that has least to do.

    costs: by target; without one, all are equal. The same arguments give the same shards on each machine. Raises
    `UsageError` where there are fewer targets than shards.
    """
    if count > len(entries):
        raise UsageError(f"{count} shards need as many targets; there are {counted(len(entries), 'targets')}")
    loads, numbers = [(0.0, 0)] * count, {}  # seconds, targets
    for entry in sorted(entries, key=lambda entry: -costs.get(entry.target, 0.0)):
        number = loads.index(min(loads))
        seconds, targets = loads[number]
        loads[number] = seconds + costs.get(entry.target, 0.0), targets + 1
        numbers[entry] = number
    return [[entry for entry in entries if numbers[entry] == number] for number in range(count)]


def github_matrix(entries: Sequence[Entry], count: int, costs: Mapping[str, float]) -> str:
    """The matrix of a job of GitHub Actions that audits a shard, as JSON in a line. Raises `UsageError` beyond 256."""
    if count > _GITHUB:
        raise UsageError(f"--matrix github takes at most {_GITHUB} --jobs; found {count}")
    shards = split(entries, count, costs)
    jobs: list[dict[str, object]] = []
    for number, shard in enumerate(shards, 1):
        minutes = {"minutes": round(sum(costs[entry.target] for entry in shard) / 60, 1)} if costs else {}
        jobs.append({"shard": f"{number}/{count}", "targets": len(shard), **minutes})
    return json.dumps({"include": jobs})
