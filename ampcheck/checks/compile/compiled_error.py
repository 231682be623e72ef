"""Requires: Outputs, loss, updated weights, buffers and overwritten arguments of compiled code are as close to float64
as rounding allows, integers are those of eager mode, and no op computes in 16 bits that eager mode computes in
float32. A difference to eager mode is no failure: fused kernels round less often. Where eager mode is beyond the
bound as well, compiled code fails only if it is far worse. Warns where a decision near a tie explains the excess
(ties of values that were never rounded do not turn), where eager mode overflows and compiled code does not, and
where a float32 output has the digits of 16 bits in eager mode alone.

Measured: An eager run under a shadow gives the exact value of each result, and what moving the data by a rounding does
to it. Compiled code runs on equal data, weights and random streams. It may be off by 8 times that movement and a few
roundings, more for long sums in float32. Where a float32 model rounds to 16 bits by casts alone, compiled code must
round there too. After a failure the compiler's stages and settings are tried. Of a training loop and a callable: the
first call of each module and function that they compile, calls after these changed, and results and weights that become
infinite or NaN in compiled code alone.

Causes: Casts that fusion leaves out, a value that is specialised and should not be, state that changes between calls.

Fix: Use the setting that the finding names, which was tried; ampcheck blame finds the op and the modules.
"""

from __future__ import annotations

from ampcheck.checks.compile import (
    VALUES,
    names_of,
    results,
    where_of,
)
from ampcheck.core.check import Check
from ampcheck.core.formats import format_of
from ampcheck.core.limits import GraphLimits, Limits
from ampcheck.core.run import Finding, Where
from ampcheck.core.subject import EVERY
from ampcheck.records.accuracy import AccuracyStats
from ampcheck.records.graphs import GraphStats
from ampcheck.records.results import FLOAT32, FLOOR, SLACK

CHECK = Check(
    "compiled-error",
    "compile",
    __doc__,
    subjects=EVERY,
    needs=("AccuracyStats", "GraphStats"),
    order=570,
    evidence=("hf/GlmAsrEncoder",),
)


def check(stats: AccuracyStats | GraphStats, limits: Limits | GraphLimits) -> list[Finding]:
    """Results are as near to float64 as rounding allows; what eager mode keeps finite stays finite."""
    if isinstance(stats, GraphStats):
        return _of_graphs(stats)
    assert isinstance(limits, Limits)
    return results(stats, CHECK, VALUES, limits, (_hidden_overflow, _finer_than_eager))


def _hidden_overflow(stats: AccuracyStats) -> list[Finding]:
    """Compiled code that is finite where eager mode overflows: no failure of compiled code, but the two disagree."""
    hidden = [e for e in stats.errors if e.hidden and not e.lost and not e.nan]
    if not hidden:
        return []
    worst = max(hidden, key=lambda e: e.hidden)
    message = (
        f"eager mode overflows where compiled code does not: {worst.hidden:,} elements of {worst} are inf or NaN in "
        f"eager mode alone; {len(hidden)} results are so"
    )
    hint = "the overflow is there and fusion hides it: a graph break brings it back; see overflow of an audit"
    where = where_of(worst)
    return [CHECK.warn(stats.name, message, where=where, observed=worst.hidden, limit=0.0, unit="elements", hint=hint)]


def _finer_than_eager(stats: AccuracyStats) -> list[Finding]:
    """A float32 output that has float32's digits compiled, and 16 bits' in eager mode.

    Both are right for what they are, and a consumer that decides by the value (a quantisation scale) decides otherwise.
    Where compiled code has no more digits than eager mode, as behind any 16-bit matmul, they only differ by rounding.
    """
    if stats.autocast or format_of(stats.format).bits > 16:
        return []
    finer = []
    for e in stats.errors:
        limit = SLACK * FLOAT32 * (e.seen.spread / (e.unit or 1.0) + FLOOR)
        if e.kind == "output" and e.dtype == "float32" and e.whole <= limit < e.eager_error / SLACK:
            finer.append((e, limit))
    if not finer:
        return []
    worst, limit = max(finer, key=lambda pair: pair[0].apart)
    message = (
        f"a float32 output promises float32's digits; {worst} has those of {stats.format} in eager mode, "
        f"{worst.eager_error:.2g} from float64, and compiled code, which fuses the roundings away, differs from it by "
        f"{worst.apart:.2g}"
    )
    hint = "cast to float32 before the last computation instead of after it; then both agree"
    where, unit = Where("forward", step=worst.step if stats.steps > 1 else None), "relative difference"
    return [CHECK.warn(stats.name, message, where=where, observed=worst.apart, limit=limit, unit=unit, hint=hint)]


def _of_graphs(stats: GraphStats) -> list[Finding]:
    """Check that what eager mode keeps finite stays finite in compiled code."""
    if not stats.lost:
        return []
    message = "compiled code must not make infinities or NaN where eager mode makes none; not finite when compiled: "
    hint = "judge the compiled module by itself, audit((model, inputs)): it names the output or gradient; "
    hint += "ampcheck blame finds the op"
    where = Where("compile")
    return [CHECK.fail(stats.subject, message + names_of(stats.lost), where=where, hint=hint)]
