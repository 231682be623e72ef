"""Requires: A result has the exact values that were recorded, whatever has changed in its last digits, and is as near
to them as its own roundings explain.

Measured: The file of goldens keeps float64 values of the results and how far float64 itself may be off; with all casts
lifted and decisions taken in float64 they are the same in every release, on every CPU and with any number of threads.
What the run itself gives is judged as an audit judges it, and a result of 64 elements and more beside the error of the
recorded run: more than four times that fails.

Causes: A changed formula, constant, weight, seed or input; for the bound, a sum or an op that is in 16 bits now.

Fix: If the change is meant, pytest --ampcheck-update writes the file again: look at the difference and commit it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.records.parity import GoldenComparison

CHECK = Check(
    "golden", "parity", __doc__, needs=("GoldenComparison",), order=752, evidence=("docs/examples/checks/golden",)
)

_UPDATE = "pytest --ampcheck-update writes it: look at the difference and commit it"


def check(golden: GoldenComparison, limits: Limits) -> Iterator[Finding]:
    """Return whether a run has the exact values that were recorded, and honest roundings."""
    name = golden.name
    if golden.failures:
        first = golden.failures[0]
        message = f"a golden must be as near to float64 as its roundings explain; {first.message}"
        yield CHECK.fail(name, message, where=first.where, hint=first.hint)
    elif golden.written:
        yield CHECK.passed(name, f"written to {golden.file}", golden.results)
    elif golden.made_in is None:
        yield CHECK.fail(name, f"a golden must be recorded; {golden.file} has none of this name", hint=_UPDATE)
    elif golden.gone or golden.new:
        listed = [", ".join(names) or "none" for names in (golden.gone, golden.new)]
        message = f"results must be those that were recorded; gone: {listed[0]}; new: {listed[1]}"
        yield CHECK.fail(name, message, hint=_UPDATE)
    else:
        yield _values(golden)


def _values(golden: GoldenComparison) -> Finding:
    """Return what the exact values say."""
    if golden.changed:
        argument, how = next(iter(golden.changed.items()))
        message = f"the arguments must be those that the golden was recorded with; {argument}: {how}"
        return CHECK.fail(golden.name, message, hint=f"if the change is meant, {_UPDATE}")
    open_ones = {*golden.undetermined, *golden.behind_opaque}
    differing = [key for key in golden.differing if key not in open_ones]
    shaken = golden.shaken and not any(key in golden.beyond_shaking for key in differing)
    first = next((key for key in differing if shaken or not golden.shaken or key in golden.beyond_shaking), "")
    if differing and shaken:
        text = f"exact values differ, and so do the last digits of {', '.join(golden.shaken)}; {first}: "
        hint = (
            "make the arguments of integers or by NumPy: torch.randn has other last digits on CPUs with other "
            f"instruction sets; if they are meant, {_UPDATE}"
        )
        return CHECK.undecided(golden.name, text + golden.differing[first], hint=hint)
    if differing:
        message = (
            f"exact values must be those that were recorded ({golden.made_in}); {first}: {golden.differing[first]}"
            "; no rounding explains that"
        )
        return CHECK.fail(golden.name, message, hint=f"if the change is meant, {_UPDATE}")
    if golden.behind_opaque:
        text = f"{', '.join(golden.opaque)} cannot be followed in float64, so whether values changed is not known"
        hint = "compare the kernel with ampcheck.assert_kernel, and leave it out here"
        return CHECK.undecided(golden.name, text, hint=hint)
    if golden.differing:
        text = f"the data determine no digit of {', '.join(list(golden.differing)[:3])}"
        return CHECK.undecided(golden.name, text, hint="record a result that the data determine")
    if golden.worse:
        key, (error, before) = max(golden.worse.items(), key=lambda item: item[1][0] / item[1][1])
        message = (
            f"a run must be as near to float64 as the recorded one ({golden.made_in}); {key}: error {error:.2g}, where "
            f"{before:.2g} was recorded: more than four times as large"
        )
        hint = f"look for a sum or an op that is in 16 bits now; if it is meant, {_UPDATE}"
        return CHECK.fail(golden.name, message, observed=error, limit=before, unit="relative error", hint=hint)
    text = f"{golden.results} results have the exact values that were recorded"
    if golden.digits is not None:
        text += f"; rounding leaves {golden.digits:.2g} digits of them"
    return CHECK.passed(golden.name, text, golden.results)
