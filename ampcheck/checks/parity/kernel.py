"""Requires: A kernel that cannot be followed inside computes what its reference in PyTorch computes, to the roundings
of one op: on every shape, layout and range that is tried, the same each time, and without a write to what the reference
leaves alone.

Measured: The reference runs in its own formats, followed in float64. The kernel gets the same values; each row of its
results may be off by a rounding of its own, one inside, and what rounding the inputs does to the result; all of them
together by no common factor. Sizes around tiles, offsets, strides and gaps, values near both ends of the format, sums
that cancel, memory that starts as NaN. A case on which all exact results are zero says nothing, and one on which the
reference itself loses values is left out.

Causes: A block that is dropped, a mask that is off by one, a sum in 16 bits, a tail that is not written, a scale that
is applied twice, contiguous memory that is assumed, an atomic add.

Fix: The finding names the case: run it alone. Sum in float32, mask loads and stores of the last tile, pass strides.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.records.parity import PASSED, REFUSED, REPEATED, KernelTrial

CHECK = Check(
    "kernel",
    "parity",
    __doc__,
    unit="roundings",
    needs=("KernelTrial",),
    order=751,
    evidence=("docs/examples/checks/kernel",),
)

_HINT = "the table of the run shows each case; sum in float32, mask the last tile, use the strides of each input"

_REASONS = 300
"""Characters of reasons in a message; the table of the run has all of them."""


def check(trial: KernelTrial, limits: Limits) -> Iterator[Finding]:
    """The case on which a kernel is furthest from its reference, or how near it stays to it on all."""
    refused, passed = trial.of(REFUSED), trial.of(PASSED)
    if refused:
        first = max(refused, key=lambda tried: (not tried.error, tried.error))
        more = f"; refused on {len(refused):,} of {len(trial.tried):,} cases" if len(refused) > 1 else ""
        message = f"a kernel must compute what {trial.reference} computes; on {first.case}: {first.reason}{more}"
        evidence: Evidence = {"observed": first.error, "limit": first.limit} if first.limit else {}
        evidence["hint"] = _HINT
        yield CHECK.fail(trial.kernel, message, **evidence)
        return
    if not passed:
        reasons = "; ".join(dict.fromkeys(tried.reason for tried in trial.tried if tried.reason)) or "there was none"
        message = f"no case says anything of the kernel: {reasons[:_REASONS]}"
        yield CHECK.undecided(trial.kernel, message, hint="give inputs on which the reference computes something")
        return
    if trial.unjudged:
        message = f"no case says anything of {', '.join(trial.unjudged)}, which is zero, or in float64, on all of them"
        yield CHECK.undecided(trial.kernel, message, hint="give inputs on which each result is judged")
        return
    worst = max(passed, key=lambda tried: tried.nearness)
    message = (
        f"as {trial.reference} on {len(passed):,} cases; at worst {worst.error:.2g} roundings, limit {worst.limit:.2g}"
        f", on {worst.case}"
    )
    if repeated := trial.of(REPEATED):
        message += f"; equal bits each time on {repeated[0].case}"
    if others := len(trial.tried) - len(passed) - len(repeated):
        message += f"; {others:,} further cases say nothing"
    yield CHECK.passed(trial.kernel, message, len(passed), observed=worst.error, limit=worst.limit)
