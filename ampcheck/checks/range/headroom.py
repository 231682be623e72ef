"""Requires: No value comes within a factor (4 by default) of the maximum of its format: a warning.

Measured: The largest magnitude that each op computes in 16 bits, in forward, and in backward if the loss is not scaled.
An op is reported where values grow beyond the limit; constants that pass through unchanged do not count.

Causes: Growth along the residual stream, unnormalised scores, a large loss scale.

Fix: Normalise or scale, or set headroom in [tool.ampcheck.limits].
"""

from __future__ import annotations

from ampcheck.checks.property import short
from ampcheck.checks.range import (
    Judges,
    faults_of,
    is_scaled,
    left_out,
    op_text,
    passed,
    wider,
)
from ampcheck.checks.range._graphs import (
    finding,
    in_phase,
    inside,
    judged,
    value_text,
)
from ampcheck.core.check import Check, first_findings
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict
from ampcheck.core.subject import EVERY
from ampcheck.records import faults
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.property import NONFINITE, RANGE, Peak, PropertyStats
from ampcheck.records.telemetry import TelemetryStats

CHECK = Check(
    "headroom",
    "range",
    __doc__,
    subjects=EVERY,
    needs=("NumericsStats", "TelemetryStats", "AccuracyStats", "PropertyStats"),
    order=180,
    evidence=("tests/corpus/chunk_decay_inverse", "tests/corpus/divergence_by_quotient"),
)

_GREW = 1.25
"""Growth from input to result above which a result counts as grown, where the input is near the maximum itself."""


def _of_run(stats: NumericsStats, limits: Limits) -> list[Finding]:
    """Nothing comes near the end of its format: a warning where a value grew to within a factor of the maximum."""
    if skipped := left_out(stats, CHECK, narrow=True):
        return skipped
    overflowed = {(f.where, f.dtype) for f in faults_of(stats, [faults.OVERFLOW, faults.MASK])}
    findings, closest = [], 0.0
    for (where, dtype), (result, source) in stats.largest.items():
        top = format_of(dtype).max
        # A constant near the end, such as the mask finfo.min, goes in as it comes out: nothing grew here.
        if (
            is_scaled(stats, where)
            or (where, dtype) in overflowed
            or not result <= top
            or result <= source * (1 + 2**-7)
        ):
            continue
        closest = max(closest, result / top)
        if result * limits.headroom > top and (source * limits.headroom <= top or result > _GREW * source):
            message = (
                f"values must stay {limits.headroom:g}x below the maximum of {dtype}; {op_text(stats, where)} reaches "
                f"{result:.5g}, {top / result:.2f}x below {top:.6g}, from inputs up to {source:.5g}"
            )
            hint = f"normalise or scale before this op, or keep it in {wider(dtype)}"
            findings.append(
                CHECK.warn(
                    stats.name, message, where=where, observed=top / result, limit=limits.headroom,
                    unit="x below max", hint=hint,
                )
            )  # fmt: skip
    if findings:
        return first_findings(findings)
    if any(fault.kind == faults.OVERFLOW for fault in stats.faults):
        return [CHECK.skip(stats.name, "values went beyond the end of their format: see overflow")]
    seen = len(stats.largest)
    if not closest:
        return [passed(stats, CHECK, "no op made a value of 16 bits larger than its inputs", seen)]
    text = f"the largest value that an op computed lies {1 / closest:.3g}x below the maximum of its format"
    return [passed(stats, CHECK, text, seen, 1 / closest, limits.headroom, "x below max")]


def _inside_graphs(stats: TelemetryStats, limits: Limits) -> list[Finding]:
    """Forward values near the end of a 16-bit format; a loss scale keeps gradients near it on purpose."""
    narrow = [s for s in in_phase(stats, "forward") if format_of(s.format).bits <= 16 and not s.bad]
    if not narrow:
        return []
    findings = []
    for site in narrow:
        top = format_of(site.format).max
        room = top / site.amax if site.amax else float("inf")
        if room >= limits.headroom:
            continue
        message = (
            f"values must stay {limits.headroom:g}x below the maximum of {site.format}; {value_text(site)} reaches "
            f"{site.amax:.5g}, {room:.2f}x below {top:.6g}"
        )
        limit, hint = limits.headroom, f"normalise or scale before this op, or keep it in {wider(site.format)}"
        findings.append(finding(CHECK, Verdict.WARN, stats, site, message, hint, room, limit, "x below max"))
    text = f"{len(narrow)} values of 16 bits are far from the maximum of their format"
    return judged(CHECK, stats, findings, text, narrow)


def _compiled(stats: AccuracyStats, limits: Limits) -> list[Finding]:
    return inside(CHECK, _inside_graphs, stats, limits)


def _of_search(stats: PropertyStats, limits: Limits) -> list[Finding]:
    """Return how far the largest value that was found lies below the end of the format."""
    peak, factor = stats.peak, limits.headroom
    if any(breaking.problem.kind in (NONFINITE, RANGE) for breaking in stats.breakings):
        return []
    if stats.overflow is not None:
        return [_overflowed(stats, stats.overflow)]
    if not peak.magnitude or stats.breakings:  # of examples that hold: what breaks another may be larger
        return []
    room = format_of(peak.format).max / peak.magnitude
    place = peak.where.module or _op(peak)
    message = (
        f"{stats.domain} the largest value found is {_magnitude(peak.magnitude)}{f' at {place}' if place else ''}; "
        f"{_magnitude(room)}x below the maximum of {peak.format}"
    )
    if room >= factor:
        seen = stats.judged
        return [CHECK.passed(stats.name, message, seen, where=peak.where, observed=room, limit=factor, unit="times")]
    hint = f"larger inputs may overflow; it is reached with {short(peak.code)}"
    return [CHECK.warn(stats.name, message, where=peak.where, observed=room, limit=factor, unit="times", hint=hint)]


def _overflowed(stats: PropertyStats, peak: Peak) -> Finding:
    """A value that left its format inside, although the output is as it should be."""
    place = f"{_op(peak)} in {peak.where.module}" if peak.where.module else _op(peak)
    message = (
        f"{stats.domain} every value inside must stay within its format; {place} makes an infinity of finite "
        f"{peak.format} values, which does not reach the output. It is reached with {short(peak.code)}"
    )
    hint = "its gradient may be NaN or zero; scale before this op, or compute it in float32"
    return CHECK.warn(stats.name, message, where=peak.where, observed=0, limit=1, unit="times", hint=hint)


def _op(peak: Peak) -> str:
    return peak.where.op.removeprefix("aten::").partition(".")[0]


def _magnitude(value: float) -> str:
    """A large number in digits as long as a person reads them: 41,216, 1.6, 3.4e+38."""
    return f"{value:,.0f}" if 100 <= value < 1e7 else f"{value:.2g}"


_JUDGES: Judges = {
    NumericsStats: _of_run,
    TelemetryStats: _inside_graphs,
    AccuracyStats: _compiled,
    PropertyStats: _of_search,
}


def check(stats: NumericsStats | TelemetryStats | AccuracyStats | PropertyStats, limits: Limits) -> list[Finding]:
    """No value comes near the end of its format."""
    return _JUDGES[type(stats)](stats, limits)
