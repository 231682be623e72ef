"""Requires: No result of forward in 16 bits is larger than 448, the largest number of float8_e4m3fn, so that
the activations of the model can be stored in it without scales.

Measured: The largest magnitude that each op of forward computes in 16 bits.

Causes: Growth along the residual stream, scores that are not normalised.

Fix: Normalise before the reported op, or store its result with a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampcheck import Finding, Limits
from ampcheck.core.check import Check
from ampcheck.core.subject import EVERY

if TYPE_CHECKING:
    from ampcheck.records.numerics import NumericsStats

CHECK = Check("acme-float8-range", "acme", __doc__, unit="magnitude", subjects=EVERY, needs=("NumericsStats",))

_LARGEST = 448.0


def check(stats: NumericsStats, limits: Limits) -> Iterator[Finding]:
    """The op with the largest result, if float8 does not hold it."""
    results = {place: largest for place, (largest, _) in stats.largest.items() if place[0].phase == "forward"}
    if not results:
        yield CHECK.absent(stats.name, "no op of forward computed in 16 bits")
        return
    (where, dtype), largest = max(results.items(), key=lambda item: item[1])
    if largest <= _LARGEST:
        text = f"the largest of {len(results)} results in 16 bits is {largest:.5g}"
        yield CHECK.passed(stats.name, text, len(results), observed=largest, limit=_LARGEST)
    else:
        text = f"activations must fit into float8_e4m3fn; a {dtype} result reaches {largest:.5g}"
        yield CHECK.warn(stats.name, text, where=where, observed=largest, limit=_LARGEST, hint=CHECK.fix)
