"""Requires: No value loses more than rounding explains to zero and to subnormal numbers. Fails at the op where it
happens, when the damage reaches an output, a gradient, a weight or a buffer.

Measured: The error against float64, as for precision-loss, where most of it is in elements below the normal numbers of
the format. Errors below flush * u of the norm are accepted, where u is the unit roundoff. Of a cast to 8 bits, whose
scale the largest row may set, all rows count alike: it fails where they lose a quarter on the average.

Causes: float16 below 6e-8: gradients of a loss that is not scaled, probabilities, variances of small activations.

Fix: Scale the loss (torch.amp.GradScaler), scale the values, use bfloat16, keep the op in float32.
"""

from __future__ import annotations

from ampcheck.checks.range import (
    Judges,
    faults_of,
    left_out,
    vanished,
)
from ampcheck.checks.range._graphs import (
    finding,
    inside,
    is_emptied,
    judged,
    value_text,
    vanished_hint,
)
from ampcheck.core.check import Check
from ampcheck.core.formats import format_of, format_of_values
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import EVERY
from ampcheck.core.text import counted
from ampcheck.records import faults
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.telemetry import TelemetryStats

CHECK = Check(
    "flush",
    "range",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats", "TelemetryStats", "AccuracyStats"),
    order=170,
    evidence=("tests/corpus/block_scale_without_second_level", "tests/corpus/probability_product"),
)


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """No value loses more than its bound to zero and to subnormal numbers, on its way to a result or gradient."""
    if skipped := left_out(stats, CHECK, narrow=True):
        return skipped
    kept = [
        fault
        for fault in faults_of(stats, [faults.FLUSH])
        if fault.examination.impact > limits.flush * format_of_values(fault.dtype).unit_roundoff
    ]
    emptied = any(fault.reaches for fault in faults_of(stats, [faults.ZERO]))
    if emptied and not any(fault.reaches for fault in kept):
        return [CHECK.skip(stats.name, "what is lost becomes zero as a whole: see silent-zero")]
    return vanished(stats, CHECK, kept, "no tensor lost more than rounding to zero and subnormal numbers")


def _inside_graphs(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """Casts that may have lost more of a tensor's norm than a rounding does."""
    casts = [site for site in stats.sites if site.cast]
    if not casts:
        return []
    findings = []
    for site in casts:
        allowed = limits.flush * format_of(site.format).unit_roundoff
        if site.lost <= allowed or is_emptied(site):
            continue
        message = (
            f"at most {allowed:.2g} of a tensor's norm may flush to zero; {value_text(site)} lost up to "
            f"{site.lost:.2g}: {site.flushed:,} of {site.nonzero:,} nonzero elements"
        )
        findings.append(
            finding(CHECK, Verdict.WARN, stats, site, message, vanished_hint(site), site.lost, allowed, "of the norm")
        )
    return judged(
        CHECK, stats, findings, f"{counted(len(casts), 'casts')} flushed no more than a rounding loses", casts
    )


def _compiled(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    return inside(CHECK, _inside_graphs, stats, limits)


_JUDGES: Judges = {NumericsStats: _of_run, TelemetryStats: _inside_graphs, AccuracyStats: _compiled}


def check(stats: NumericsStats | TelemetryStats | AccuracyStats, limits: Limits) -> list[Finding]:
    """Check that what 16 bits hold is not lost to zero."""
    return _JUDGES[type(stats)](stats, limits)
