"""Requires: No tensor becomes zero as a whole, and no element that a later division, logarithm or root needs. Fails at
the op at which the values become zero, when the damage reaches an output, a gradient, a weight or an update of it,
or a buffer.

Measured: Elements that are zero here and not in float64, and that are too small for the format; a later op that gives
inf or NaN for their sake is named too.

Causes: eps=1e-8 in float16, squares of small numbers, a model whose weights are zero or tiny at initialisation.

Fix: Use an eps within the range of the format, scale before squaring, compute the guard in float32.
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
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import EVERY
from ampcheck.core.text import counted
from ampcheck.records import faults
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.telemetry import TelemetryStats

CHECK = Check(
    "silent-zero",
    "range",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats", "TelemetryStats", "AccuracyStats"),
    order=160,
    evidence=("tests/corpus/charbonnier_root_of_zero", "tests/corpus/chunk_decay_inverse"),
)


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """No tensor becomes zero as a whole, and no guarding constant, on its way to a result or gradient."""
    if skipped := left_out(stats, CHECK, narrow=True):
        return skipped
    kept = faults_of(stats, [faults.ZERO])
    return vanished(stats, CHECK, kept, "no tensor and no needed constant became zero")


def _inside_graphs(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """Casts that make a whole tensor zero, in every measured call."""
    casts = [site for site in stats.sites if site.cast]
    if not casts:
        return [CHECK.skip(stats.subject, "no cast to 16 bits was measured inside compiled graphs")]
    findings = []
    for site in filter(is_emptied, casts):
        message = (
            f"a tensor must not vanish; {value_text(site)} became zero altogether in each of {site.calls:,} measured "
            f"calls ({site.flushed:,} nonzero elements, the largest {site.amax:.3g})"
        )
        verdict = (
            Verdict.FAIL if (site.where.phase == "backward" if stats.harmed is None else stats.harmed) else Verdict.WARN
        )
        findings.append(finding(CHECK, verdict, stats, site, message, vanished_hint(site), site.flushed))
    return judged(CHECK, stats, findings, f"none of {counted(len(casts), 'casts')} made everything zero", casts)


def _compiled(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    return inside(CHECK, _inside_graphs, stats, limits)


_JUDGES: Judges = {NumericsStats: _of_run, TelemetryStats: _inside_graphs, AccuracyStats: _compiled}


def check(stats: NumericsStats | TelemetryStats | AccuracyStats, limits: Limits) -> list[Finding]:
    """No tensor, and nothing that a later op needs, becomes zero."""
    return _JUDGES[type(stats)](stats, limits)
