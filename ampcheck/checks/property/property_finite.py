"""Requires: Finite inputs give finite outputs, over all inputs of a strategy. Also fails where the true value is beyond
the format, which no implementation can avoid.

Measured: Hypothesis draws inputs at the edges of the format, searches for large values and errors, and minimises a
failure; float64 on the same inputs is the reference. Elements that are not finite there are not judged.

Causes: An exp without subtracting the largest, squares of large numbers, an eps that is zero in float16, a sum before
the division.

Fix: Use the stable form, scale before squaring, take eps from torch.finfo, keep the part in float32; or declare smaller
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.property import judged
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.text import counted
from ampcheck.records.property import NONFINITE, RANGE, Problem, PropertyStats

CHECK = Check("property-finite", "property", __doc__, needs=("PropertyStats",), order=700)

_WORDS = {
    NONFINITE: "finite inputs must give finite outputs; {value} is {low}, and {exact} in float64",
    RANGE: "what the declared inputs give must fit into the output's format; {value} is {exact} in float64, and {low} "
    "here: no code mends that, only another format or other inputs",
}
_OF_AN_OP = {
    NONFINITE: "results must be finite; {detail} has {error}",
    RANGE: "results must agree with float64; {detail} has {error}",
}
_HOLDS = "finite inputs gave finite outputs"


def check(stats: PropertyStats, limits: Limits) -> Iterator[Finding]:
    """The inputs whose outputs are not finite, or the count of those that were judged."""

    def passed() -> Finding:
        message = f"{_HOLDS} ({counted(stats.judged, 'examples')}, {counted(stats.elements, 'elements')})"
        return CHECK.passed(stats.name, message, stats.elements, observed=0.0, limit=0.0, unit="examples")

    return judged(stats, CHECK, _words, passed)


def _words(problem: Problem) -> str:
    return (_OF_AN_OP if problem.detail else _WORDS).get(problem.kind, "")
