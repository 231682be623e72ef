"""Requires: Calls after the warm-up do not recompile. Fails when more than max_recompiles compilations come after the
warm-up or, in it, for a value that had varied before.

Measured: All calls run as a warm-up and once more. The message names the guard that failed, by kind: shape, dtype,
training flag, grad mode, autocast, inference mode, constant. In the warm-up each value may vary once, by which Dynamo
learns the dynamic sizes. Without a warm-up, as in a block of code, only that first new size is free. A training loop
and a callable have no end of their warm-up: each value may vary once, and one more is allowed.

Causes: A Python number or a layer's index that changes, a size with dynamic=False or of 1, train and eval or grad modes
in turn, new objects for each call. After eight graphs Dynamo runs a function in eager mode.

Fix: Mark what varies with torch._dynamo.mark_dynamic, keep numbers in buffers or tensors, warm up in each mode that
occurs, or accept them with max_recompiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ampcheck.checks.compile import (
    names_of,
    passed_graphs,
)
from ampcheck.core.check import Check
from ampcheck.core.limits import GraphLimits
from ampcheck.core.run import Finding
from ampcheck.core.subject import EVERY
from ampcheck.core.text import counted
from ampcheck.records.graphs import GraphStats, Recompile

CHECK = Check(
    "recompile",
    "compile",
    __doc__,
    unit="recompilations",
    subjects=EVERY,
    needs=("GraphStats",),
    order=510,
    evidence=("tests/corpus/training/betas_move_under_compiled_step",),
)

_GUARDS = {
    "other": "something else",
    "invalidated": "an object that was freed",
    "constant": "a constant",
    "constant attribute": "a constant attribute",
    "identity": "an object's identity",
    "length": "the length of a list or dict",
    "type": "the type of a value",
    "training flag": "the training flag",
    "grad mode": "the grad mode",
}
"""Kinds of guards as a message names them."""


def check(stats: GraphStats, limits: GraphLimits) -> list[Finding]:
    """No frame is compiled again beyond the limit; one failure for each frame and kind of guard."""
    limit = limits.max_recompiles
    charged = [recompile for recompile in stats.recompiles if counts(recompile, stats)]
    free = [recompile for recompile in stats.recompiles if not counts(recompile, stats)]
    spared = f"; {counted(len(free), 'recompilations')} to learn what varies ({_kinds(free)})" if free else ""
    beyond = " beyond the warm-up" if stats.warm else ""
    if len(charged) <= limit:
        message = f"{counted(len(charged), 'recompilations', 'no')}{beyond}, at most {limit} allowed"
        message += f" ({_kinds(charged)})" if charged else ""
        return passed_graphs(CHECK, stats, message + spared, len(charged), limit)
    groups: dict[tuple[str, str], list[Recompile]] = {}
    for recompile in charged:
        groups.setdefault((recompile.frame, recompile.kind), []).append(recompile)
    findings = []
    for (frame, kind), group in groups.items():
        message = f"at most {limit} recompilations are allowed{beyond}, there were {len(charged)}; "
        message += f"{len(group)} of {frame} by its guard on {_GUARDS.get(kind, kind)}: "
        message += names_of(f"`{recompile.guard}`" for recompile in group)
        if late := sum(recompile.late for recompile in group):
            message += f"; {counted(late, 'compilations')} after the warm-up"
        findings.append(
            CHECK.fail(
                stats.subject,
                message + spared,
                where=group[-1].where,
                hint=group[-1].hint,
                observed=len(charged),
                limit=limit,
            )
        )
    return findings


def counts(recompile: Recompile, stats: GraphStats) -> bool:
    """Return whether a recompilation counts: after the warm-up, of a value that had varied, or without any warm-up."""
    first_size = recompile.kind == "shape" and not recompile.repeated
    return recompile.late or recompile.repeated or not (stats.warm or first_size)


def _kinds(recompiles: Iterable[Recompile]) -> str:
    counts = Counter(recompile.kind for recompile in recompiles)
    return ", ".join(f"{kind} {count}" if count > 1 else kind for kind, count in counts.items())
