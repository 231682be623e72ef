"""Many arms compiled in one process, each of them really compiled.

Arms are copies of one model and share its code, and Dynamo bounds how often it compiles one function (8 times by
default): beyond that a copy runs eager without a word, and would be timed as compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ampcheck.numerics.compiled import dynamo_still
from ampcheck.torchtools import dynamo

COMPILATIONS = 256
"""How often one function may be compiled inside `many_compilations`."""


@dataclass(frozen=True, slots=True)
class Made:
    """What was compiled. graphs, breaks: how many; why: the reason of the first break, or of no graph at all."""

    graphs: int
    breaks: int
    why: str


@contextmanager
def many_compilations(device: str = "cpu") -> Iterator[None]:
    """Dynamo is reset, keeps still, and compiles one function as often as there are arms; it is reset again at the end.

    Something small is compiled first: the first compilation of a process imports the compiler and asks what the
    processor can do, which is charged to no arm.
    """
    dynamo.reset()
    limit = dynamo.recompile_limit()
    total = limit.replace("config.", "config.accumulated_")
    limits = {limit: COMPILATIONS, total: max(COMPILATIONS, dynamo.setting(total))}
    with dynamo_still(), dynamo.configured(limits):
        _awake(device)
        try:
            yield
        finally:
            dynamo.reset()


def compilations() -> Callable[[], Made]:
    """A function that tells what Dynamo has compiled since now."""
    before = {group: dynamo.counters(group) for group in ("stats", "graph_break")}

    def made() -> Made:
        since = {group: dynamo.counters(group) - known for group, known in before.items()}
        graphs, breaks = since["stats"]["unique_graphs"], since["graph_break"]
        why = next(iter(breaks), "" if graphs else "torch.compile made no graph").strip()
        return Made(graphs, sum(breaks.values()), why.splitlines()[0] if why else "")

    return made


def _awake(device: str) -> None:
    try:
        given = torch.ones(64, requires_grad=True, device=device)
        torch.compile(lambda x: (2 * x).sin().sum())(given).backward()
    except Exception:  # noqa: BLE001  # no compiler: each arm that needs one will say so
        return
