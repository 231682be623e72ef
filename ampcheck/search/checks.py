"""What a search finds besides its properties: exceptions, the headroom that is left, and how much was examined."""

from __future__ import annotations

from ampcheck.catalog.numerics import COVERAGE, HEADROOM, LOW_PRECISION_ERROR
from ampcheck.checks import findings
from ampcheck.checks.property import failures, short
from ampcheck.core.formats import format_of
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.text import cannot_run
from ampcheck.records.property import NONFINITE, RAISES, RANGE, Peak, Problem, PropertyStats


def check_property(stats: PropertyStats, limits: Limits) -> list[Finding]:
    """Every property that was searched for, the headroom that is left, and how much was examined."""
    if not stats.breakings and not stats.elements:
        return [_nothing(stats)]
    raised = failures(stats, LOW_PRECISION_ERROR, _words)
    return [*raised, *findings(stats, limits), *_headroom(stats, limits.headroom), _coverage(stats)]


def _words(problem: Problem) -> str:
    return "what runs in float32 must run in {format}; it raises {detail}" if problem.kind == RAISES else ""


def _headroom(stats: PropertyStats, factor: float) -> list[Finding]:
    """How far the largest value that was found lies below the end of the format."""
    peak = stats.peak
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
        return [HEADROOM.passed(stats.name, message, seen, where=peak.where, observed=room, limit=factor, unit="times")]
    hint = f"larger inputs may overflow; it is reached with {short(peak.code)}"
    return [HEADROOM.warn(stats.name, message, where=peak.where, observed=room, limit=factor, unit="times", hint=hint)]


def _overflowed(stats: PropertyStats, peak: Peak) -> Finding:
    """A value that left its format inside, although the output is as it should be."""
    place = f"{_op(peak)} in {peak.where.module}" if peak.where.module else _op(peak)
    message = (
        f"{stats.domain} every value inside must stay within its format; {place} makes an infinity of finite "
        f"{peak.format} values, which does not reach the output. It is reached with {short(peak.code)}"
    )
    hint = "its gradient may be NaN or zero; scale before this op, or compute it in float32"
    return HEADROOM.warn(stats.name, message, where=peak.where, observed=0, limit=1, unit="times", hint=hint)


def _coverage(stats: PropertyStats) -> Finding:
    notes = [f"looked at {stats.coverage}"]
    if stats.stopped:
        notes.append(f"{stats.examples} of {stats.budget} examples, since {stats.stopped}")
    notes += [f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items()]
    total, text = stats.coverage.total, "; ".join(notes)
    if not (stats.peak.format or stats.breakings or stats.overflow):
        text = f"a verdict on {stats.format} needs ops that compute in it; none did: {text}"
        return COVERAGE.warn(stats.name, text, observed=0, limit=1, unit="ops")
    if stats.outside <= stats.examples / 2:
        return COVERAGE.passed(stats.name, text, total, observed=total, limit=1, unit="observations")
    return COVERAGE.warn(stats.name, text, observed=total, limit=1, unit="observations")


def _nothing(stats: PropertyStats) -> Finding:
    if stats.lacking:
        return COVERAGE.skip(stats.name, f"not judged: {cannot_run(stats.lacking)}")
    message = f"a verdict needs evidence; of {stats.examples} examples none could be judged"
    notes = [f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items()]
    if stats.examples > stats.outside and not notes:
        notes.append("no output has an element")
    if stats.stopped:
        notes.append(stats.stopped)
    message += f": {'; '.join(notes)}" if notes else ""
    hint = "draw finite inputs that the function takes, and return tensors or numbers"
    return COVERAGE.fail(stats.name, message, observed=0, limit=1, unit="examples", hint=hint)


def _op(peak: Peak) -> str:
    return peak.where.op.removeprefix("aten::").partition(".")[0]


def _magnitude(value: float) -> str:
    """A large number in digits as long as a person reads them: 41,216, 1.6, 3.4e+38."""
    return f"{value:,.0f}" if 100 <= value < 1e7 else f"{value:.2g}"
