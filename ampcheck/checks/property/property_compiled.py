"""Requires: Compiled code keeps the bounds that eager mode keeps on the inputs of a strategy. Skipped if nothing can be
compiled.

Measured: The model is compiled once, with dynamic shapes, for at most four kinds of shapes. Its outputs are compared
with the float64 values of the eager run; integers and dtypes must be those of eager mode, near ties aside.

Causes: A kernel that is wrong in one dtype or at one value, an approximation in Inductor.

Fix: Reproduce with torch.compile(model, backend='aot_eager') to separate Inductor from tracing, and report it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.property import judged
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.text import counted
from ampcheck.records.property import COMPILED, Problem, PropertyStats

CHECK = Check("property-compiled", "property", __doc__, needs=("PropertyStats",), order=720)

_WORDS = "compiled code must keep the bounds that eager mode keeps; {value} is {low}, and {exact} in float64"
_RAISES = "compiled code must keep the bounds that eager mode keeps; {detail}"
_HOLDS = "compiled code kept the bounds that eager mode keeps"


def check(stats: PropertyStats, limits: Limits) -> Iterator[Finding]:
    """The inputs at which compiled code leaves the bounds, or the count of those on which it ran."""

    def passed() -> Finding:
        examples = stats.compiled_examples
        message = f"{_HOLDS} ({counted(examples, 'examples')}, {counted(stats.elements, 'elements')})"
        return CHECK.passed(stats.name, message, examples, observed=0.0, limit=0.0, unit="examples")

    return judged(stats, CHECK, _words, passed)


def _words(problem: Problem) -> str:
    if problem.kind != COMPILED:
        return ""
    return _RAISES if problem.detail.startswith("it ") else _WORDS
