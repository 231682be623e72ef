"""Requires: Every row of the output differs from float64 by no more than rounding explains, and decisions (comparisons,
indices) are those of float64 unless they are near ties, over all inputs of a strategy.

Measured: Every tensor of the run carries its float64 value, and a second one for inputs and weights moved by a unit
roundoff. What the move changes, and a few roundings, is the bound. An op whose result leaves it while its inputs keep
it is at fault; it fails where the error is left in an output.

Causes: Differences of large numbers, log(1 + x) and exp(x) - 1 near zero, a variance by E[x^2] - E[x]^2, intermediate
values that overflow or flush to zero.

Fix: Use log1p, expm1, logsumexp, a variance in two passes, or compute the part in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.property import judged
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.text import counted
from ampcheck.records.property import ACCURACY, DECISION, Problem, PropertyStats

CHECK = Check("property-accuracy", "property", __doc__, needs=("PropertyStats",), order=710)

_WORDS = "the output must agree with float64; {value} is {low} and should be {exact}: {error}"
_OF_AN_OP = "results must agree with float64; {detail} has {error}"
_DECISION = "decisions must be those of float64, except for near ties; {detail} is another, beyond {error}"
_HOLDS = "every output agreed with float64 within what rounding explains"


def check(stats: PropertyStats, limits: Limits) -> Iterator[Finding]:
    """The inputs whose outputs are further from float64 than rounding explains, or the largest error of the others."""

    def passed() -> Finding:
        message = f"{_HOLDS} ({counted(stats.judged, 'examples')}, {counted(stats.elements, 'elements')})"
        return CHECK.passed(stats.name, message, stats.elements, observed=stats.ratio, limit=1.0, unit="of the limit")

    return judged(stats, CHECK, _words, passed)


def _words(problem: Problem) -> str:
    accuracy = _OF_AN_OP if problem.detail else _WORDS
    return {ACCURACY: accuracy, DECISION: _DECISION}.get(problem.kind, "")
