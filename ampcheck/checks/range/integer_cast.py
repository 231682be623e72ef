"""Requires: Different integers stay different in floating tensors. Fails when something is computed from integers that
became equal; warns otherwise.

Measured: Floating tensors of whole numbers that came from integers are followed through casts (autocast's too), cumsum,
sums, products and copies, beside their float64 values; different values are counted in both. float16 represents every
integer up to 2048, bfloat16 up to 256, float32 up to 16,777,216.

Causes: torch.arange(n).to(x.dtype) or type_as, position ids and time steps cast with the model, counters in buffers.

Fix: Compute with positions in float32 and cast the result; where autocast makes the cast, as of the operands of a
matrix product, with torch.autocast(device, enabled=False) around the op.
"""

from __future__ import annotations

from ampcheck.checks.range import (
    elements_lost,
    faults_of,
    left_out,
    op_text,
    passed,
)
from ampcheck.core.check import Check, Evidence, first_findings
from ampcheck.core.formats import format_of_values
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import EVERY
from ampcheck.core.text import counted
from ampcheck.records import faults
from ampcheck.records.numerics import NumericsStats

CHECK = Check(
    "integer-cast",
    "range",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats",),
    order=140,
    evidence=("tests/corpus/alibi_in_bfloat16", "tests/corpus/count_ratio_in_half"),
)


def check(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Different integers stay different in floats: positions, ids and counters beyond 2^p do not.

    It fails where something computed from them, else it warns.
    """
    if skipped := left_out(stats, CHECK):
        return skipped
    findings = []
    for fault in faults_of(stats, [faults.COLLISION]):
        seen = fault.examination
        what = f"{fault.elements:,} equal to another, of values up to {fault.exact_amax:.6g}"
        if seen.error:  # a conversion to integers decided
            what = (
                f"other integers than float64 of {fault.elements:,} of {fault.numel:,} values up to {fault.amax_in:.6g}"
            )
        up_to = format_of_values(fault.dtype).largest_exact_integer
        reason = fault.note if faults.ENDS in fault.note else f"{fault.dtype} holds every integer up to {up_to} only"
        message = f"different integers must stay different; {op_text(stats, fault.where)} makes {what}: {reason}"
        larger = "float64" if fault.dtype == "float32" else "float32"
        kept = larger if larger == "float64" else f"{larger} (under autocast, with enabled=False around the op)"
        hint = f"keep positions, ids and counters in an integer dtype or {kept}, and cast the result, not the integer"
        if faults.ENDS in fault.note:
            hint = "clamp to the range of the integers before the conversion, and compute the scale in float32"
        verdict = Verdict.FAIL if fault.reaches else Verdict.WARN
        shown = Evidence(where=fault.where, hint=hint)
        findings.append(elements_lost(stats, CHECK, verdict, message, fault.elements, shown))
    if not findings and not stats.whole:
        return [CHECK.absent(stats.name, "no integers were seen in 16 bits")]
    text = f"different integers stayed different in {counted(stats.whole, 'results')} of 16 bits"
    return first_findings(findings) or [passed(stats, CHECK, text, stats.whole, 0, 0, "elements")]
