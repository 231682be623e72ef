"""The findings of a search. Pure functions from `PropertyStats` to findings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampcheck.catalog import REGISTRY
from ampcheck.catalog.numerics import COVERAGE, HEADROOM
from ampcheck.catalog.search import PROPERTY_INVARIANCE
from ampcheck.core.check import Check
from ampcheck.core.formats import format_of
from ampcheck.core.run import Finding
from ampcheck.core.text import counted
from ampcheck.search import stats as kinds
from ampcheck.search.remedies import remedy
from ampcheck.search.stats import Breaking, Peak, Problem, PropertyStats
from ampcheck.torchtools.unsupported import cannot_run

CHECKS = ("property-finite", "property-accuracy", "property-compiled", "property-invariance")

_KINDS = {
    "low-precision-error": (kinds.RAISES,),
    "property-finite": (kinds.NONFINITE, kinds.RANGE),
    "property-accuracy": (kinds.ACCURACY, kinds.DECISION),
    "property-compiled": (kinds.COMPILED,),
    "property-invariance": (kinds.INVARIANCE,),
}

_SHOWN = 600
"""Characters of an example in a message; the run's table and the written test have all of it."""

_HOLDS = {
    "property-finite": "finite inputs gave finite outputs",
    "property-accuracy": "every output agreed with float64 within what rounding explains",
    "property-compiled": "compiled code kept the bounds that eager mode keeps",
}


def check_property(stats: PropertyStats, headroom: float) -> list[Finding]:
    """Every property that was searched for, the headroom that is left, and how much was examined.

    headroom: warn from this factor below the format's maximum.
    """
    if not stats.breakings and not stats.elements:
        return [_nothing(stats)]
    findings = []
    for slug, of_kind in _KINDS.items():
        check = REGISTRY[slug]
        broken = [breaking for breaking in stats.breakings if breaking.problem.kind in of_kind]
        findings += [_failed(stats, check, breaking) for breaking in broken]
        if not broken and slug in stats.skipped:
            findings.append(check.skip(stats.name, stats.skipped[slug]))
        elif not broken and slug == "property-invariance":
            findings += _invariances(stats)
        elif not broken and slug in stats.asked:
            findings.append(_passed(stats, check))
    return [*findings, *_headroom(stats, headroom), _coverage(stats)]


def _passed(stats: PropertyStats, check: Check) -> Finding:
    compiled, accuracy = check.slug == "property-compiled", check.slug == "property-accuracy"
    examples = stats.compiled_examples if compiled else _judged(stats)
    message = f"{_HOLDS[check.slug]} ({counted(examples, 'examples')}, {counted(stats.elements, 'elements')})"
    observed, limit, unit = (stats.ratio, 1.0, "of the limit") if accuracy else (0.0, 0.0, "examples")
    seen = examples if compiled else stats.elements
    return check.passed(stats.name, message, seen, observed=observed, limit=limit, unit=unit)


def _failed(stats: PropertyStats, check: Check, breaking: Breaking) -> Finding:
    problem = breaking.problem
    searched = f"after {breaking.found_after} of {stats.budget} examples"
    if stats.cut:
        searched += "; making it smaller was cut short by the budget"
    if breaking.climbed:  # of a lone input, beyond what was drawn for it
        searched = f"by gradient ascent {stats.domain}, the declared domain, {searched}"
    text = f"{_text(stats, problem)}. The smallest input found is {_short(breaking.example.code())}, {searched}"
    hints = [remedy(problem.kind, problem.where.op, vanished=problem.vanished)]
    hints += [f"run pytest {breaking.file}"] if breaking.file else []
    hints += [f"no test was written: {breaking.unwritten}"] if breaking.unwritten else []
    unit = "elements" if problem.kind in (kinds.NONFINITE, kinds.RANGE) else "relative error"
    measured = (problem.observed, problem.limit) if problem.observed else (None, None)
    return check.fail(
        stats.name,
        text,
        where=problem.where,
        observed=measured[0],
        limit=measured[1],
        unit=unit,
        hint="; ".join(filter(None, hints)),
    )


def _text(stats: PropertyStats, problem: Problem) -> str:
    value = f"output {problem.output}[{problem.index}]" if problem.output else f"element {problem.index} of the output"
    low, exact = describe_value(problem.low), describe_value(problem.exact)
    error = f"a relative error of {problem.observed:.2g}, where rounding explains {problem.limit:.2g}"
    if problem.kind == kinds.RAISES:
        return f"what runs in float32 must run in {stats.format}; it raises {problem.detail}"
    if problem.kind == kinds.DECISION:
        return f"decisions must be those of float64, except for near ties; {problem.detail} is another, beyond {error}"
    if problem.kind == kinds.INVARIANCE:
        return f"a declared invariance must hold; {problem.detail}: {value} is {low}, not {exact}"
    if problem.kind == kinds.COMPILED:
        about = problem.detail if problem.detail.startswith("it ") else f"{value} is {low}, and {exact} in float64"
        return f"compiled code must keep the bounds that eager mode keeps; {about}"
    if problem.detail:
        finite = "be finite" if problem.kind == kinds.NONFINITE else "agree with float64"
        return f"results must {finite}; {problem.detail} has {error}"
    if problem.kind == kinds.ACCURACY:
        return f"the output must agree with float64; {value} is {low} and should be {exact}: {error}"
    if problem.kind == kinds.RANGE:
        return (
            f"what the declared inputs give must fit into the output's format; {value} is {exact} in float64, and "
            f"{low} here: no code mends that, only another format or other inputs"
        )
    return f"finite inputs must give finite outputs; {value} is {low}, and {exact} in float64"


def _judged(stats: PropertyStats) -> int:
    """Examples that were judged, those of gradient ascent included."""
    return stats.examples - stats.outside + stats.climbs


def _invariances(stats: PropertyStats) -> Iterator[Finding]:
    """Each invariance that was declared and is not broken; one that changed no input shows nothing."""
    check, unit = PROPERTY_INVARIANCE, "examples"
    for name, count in stats.invariances.items():
        if count:
            message = f"{name} held ({counted(count, 'examples')} that it changes)"
            yield check.passed(stats.name, message, count, observed=count, limit=1, unit=unit)
        elif stats.breakings:
            yield check.skip(stats.name, f"{name} was not judged: another property breaks first")
        else:
            message = f"a declared invariance must be judged, and {name} changed no input that could be judged"
            hint = "declare what changes the inputs, or draw inputs that it changes"
            yield check.fail(stats.name, message, observed=0, limit=1, unit=unit, hint=hint)


def _headroom(stats: PropertyStats, factor: float) -> list[Finding]:
    """How far the largest value that was found lies below the end of the format."""
    peak = stats.peak
    if any(breaking.problem.kind in (kinds.NONFINITE, kinds.RANGE) for breaking in stats.breakings):
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
        seen = _judged(stats)
        return [HEADROOM.passed(stats.name, message, seen, where=peak.where, observed=room, limit=factor, unit="times")]
    hint = f"larger inputs may overflow; it is reached with {_short(peak.code)}"
    return [HEADROOM.warn(stats.name, message, where=peak.where, observed=room, limit=factor, unit="times", hint=hint)]


def _overflowed(stats: PropertyStats, peak: Peak) -> Finding:
    """A value that left its format inside, although the output is as it should be."""
    place = f"{_op(peak)} in {peak.where.module}" if peak.where.module else _op(peak)
    message = (
        f"{stats.domain} every value inside must stay within its format; {place} makes an infinity of finite "
        f"{peak.format} values, which does not reach the output. It is reached with {_short(peak.code)}"
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


def describe_value(value: float) -> str:
    """A number in a message: short, with infinities and NaN by name."""
    return f"{value:.6g}" if math.isfinite(value) else "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _short(code: str) -> str:
    return code if len(code) <= _SHOWN else f"{code[:_SHOWN]}... ({len(code):,} characters)"


def _op(peak: Peak) -> str:
    return peak.where.op.removeprefix("aten::").partition(".")[0]


def _magnitude(value: float) -> str:
    """A large number in digits as long as a person reads them: 41,216, 1.6, 3.4e+38."""
    return f"{value:,.0f}" if 100 <= value < 1e7 else f"{value:.2g}"
