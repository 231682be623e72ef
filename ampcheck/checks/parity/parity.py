"""Requires: Two executions agree: they compute one function, and each of them is as near to its exact value as its own
roundings explain. Fails when exact values differ, or when one side is beyond its own bound. Undecided where the data
determine nothing.

Measured: Each side runs under float64 companions, with all casts lifted. Exact values that are equal to what float64
can hold are of one function; whatever the two then differ by is rounding, and each is judged alone, as an audit judges
it. Where exact values differ, both run again and take the decisions of float64, so that a near tie is no difference,
and a walk back from the result, over the values that only one of them has, ends at the first op of each side. A custom
kernel is judged by the exact values of the other side; compiled code also runs in float64, where it must give what
eager mode gives.

Causes: A missing scale, another eps or its place, an axis or an order, a mask that is off by one, a weight that was not
copied; sums, tables or angles in 16 bits, an overflow on one side alone.

Fix: Look at the two ops that the finding names: what comes before them is equal. If one side is beyond its bound, do
what the finding says of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.core.check import Check, Evidence
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.records.parity import (
    AGREE,
    ANOTHER,
    COMPILED,
    INPUTS,
    NUMBERS,
    RECORDED,
    STRUCTURE,
    UNDECIDED,
    WRONG,
    Parity,
)

CHECK = Check(
    "parity",
    "parity",
    __doc__,
    unit="roundings",
    needs=("Parity",),
    order=750,
    evidence=("docs/examples/checks/parity",),
)

_WORDS = {
    ANOTHER: "two executions must compute one function; {message}",
    WRONG: "two executions must each be within the bound of its own rounding; {message}",
    UNDECIDED: "whether the two agree is open: {message}",
}
_HINTS = {
    ANOTHER: "compare what the two ops compute: what could be matched before them is equal on both sides",
    WRONG: "sum in float32, and round once, at the end",
    UNDECIDED: "give inputs that determine the results: no zeros, more than one row, data that do not cancel",
}
_UNPLACED = {
    INPUTS: "give both sides the same inputs",
    STRUCTURE: "let both give the same results: wrap one in a function that returns, writes or detaches as the other",
    NUMBERS: "return what the number is computed from as well: tensors of floating point have their ops named",
    RECORDED: "compare what each side returns; two sides that run in one comparison have their ops named",
    COMPILED: "compare by rounding: bits of compiled code are those of no op of eager mode",
    "": "compare which values each side returns, and in which order: both have those on the way",
}


def check(parity: Parity, limits: Limits) -> Iterator[Finding]:
    """Return whether the two agree; where not, the ops at which they part, or the op at which a side leaves its
    bound."""
    notes = "".join(f"; {note}" for note in parity.notes)
    if parity.outcome == AGREE:
        yield CHECK.passed(parity.subject, parity.message + notes, parity.compared, observed=parity.roundings)
        return
    message, hint = _WORDS[parity.outcome].format(message=parity.message) + notes, _HINTS[parity.outcome]
    if parity.outcome == UNDECIDED:
        yield CHECK.undecided(parity.subject, message, hint=hint)
        return
    if parity.outcome == ANOTHER and parity.at == (None, None):
        hint = _UNPLACED[parity.unplaced]
    evidence: Evidence = {"hint": parity.failures[0].hint or hint if parity.failures else hint}
    if (where := parity.at[1] or parity.at[0]) is not None:
        evidence["where"] = where
    if parity.outcome == WRONG and (wrong := [kernel for kernel in parity.kernels if kernel.wrong]):
        evidence |= {"observed": wrong[0].error, "limit": wrong[0].limit}
    yield CHECK.fail(parity.subject, message, **evidence)
