"""Many arms compiled in one process, each of them really compiled.

Arms are copies of one model and share its code, and Dynamo bounds how often it compiles one function (8 times by
default): beyond that a copy silently falls back to eager, and would be timed as compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

import torch

from ampcheck.numerics.compiled import dynamo_warnings_suppressed
from ampcheck.torchtools import dynamo

COMPILATIONS = 256
"""Compilations of one function that are allowed inside `many_compilations`."""


@contextmanager
def many_compilations(device: str = "cpu") -> Iterator[None]:
    """Raise Dynamo's limit of recompilations and silence its logs; Dynamo is reset before and after.

    A small function is compiled first: the first compilation of a process imports the compiler and probes the
    processor, which is charged to no arm.
    """
    dynamo.reset()
    limit = dynamo.recompile_limit()
    total = limit.replace("config.", "config.accumulated_")
    limits = {limit: COMPILATIONS, total: max(COMPILATIONS, dynamo.setting(total))}
    with dynamo_warnings_suppressed(), dynamo.configured(limits):
        _warm_up_compiler(device)
        try:
            yield
        finally:
            dynamo.reset()


@lru_cache
def _warm_up_compiler(device: str) -> None:
    with suppress(Exception):  # no compiler: each arm that needs one reports it
        x = torch.ones(64, requires_grad=True, device=device)
        torch.compile(lambda x: (2 * x).sin().sum())(x).backward()
