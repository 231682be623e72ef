"""Requires: A declared invariance holds: batch order, scale, shift, padding, rows of a batch alone or another
circumstance of parity, or one of your own.

Measured: Low precision is judged at the changed inputs, or in the circumstance, as elsewhere; float64 shows whether the
invariance holds at all.

Causes: A result that depends on its neighbours in a batch, a norm whose eps or squares leave the range when the scale
changes, padding that enters a mean.

Fix: Mask padding, scale before squaring, or correct the declaration.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.property import failures
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.text import counted
from ampcheck.records.property import INVARIANCE, Problem, PropertyStats

CHECK = Check("property-invariance", "property", __doc__, needs=("PropertyStats",), order=730)

_WORDS = "a declared invariance must hold; {detail}: {value} is {low}, not {exact}"
_CHANGED_NOTHING = "a declared invariance must be judged, and {name} changed no input that could be judged"
_HINT = "declare what changes the inputs, or draw inputs that it changes"


def check(stats: PropertyStats, limits: Limits) -> Iterator[Finding]:
    """The inputs that break an invariance; else each of them, which shows nothing if it changed no input."""
    if failed := list(failures(stats, CHECK, _words)):
        yield from failed
    elif CHECK.slug in stats.skipped:
        yield CHECK.skip(stats.name, stats.skipped[CHECK.slug])
    else:
        for name, count in stats.invariances.items():
            yield _held(stats, name, count)


def _held(stats: PropertyStats, name: str, count: int) -> Finding:
    if count:
        message = f"{name} held ({counted(count, 'examples')} that it changes)"
        return CHECK.passed(stats.name, message, count, observed=count, limit=1, unit="examples")
    if stats.breakings:
        return CHECK.skip(stats.name, f"{name} was not judged: another property breaks first")
    message = _CHANGED_NOTHING.format(name=name)
    return CHECK.fail(stats.name, message, observed=0, limit=1, unit="examples", hint=_HINT)


def _words(problem: Problem) -> str:
    return _WORDS if problem.kind == INVARIANCE else ""
