"""What a search says of each property. Pure functions from `PropertyStats` to findings."""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.catalog import REGISTRY
from ampcheck.catalog.numerics import COVERAGE, HEADROOM
from ampcheck.catalog.search import PROPERTY_INVARIANCE
from ampcheck.core.check import Check
from ampcheck.core.formats import format_of
from ampcheck.core.run import Finding
from ampcheck.search import stats as kinds
from ampcheck.search.evaluate import describe_value
from ampcheck.search.remedies import remedy
from ampcheck.search.stats import Breaking, Peak, PropertyStats
from ampcheck.torchtools.unsupported import cannot_run

CHECKS = ("property-finite", "property-accuracy", "property-compiled", "property-invariance")

_KINDS = {
    "low-precision-error": (kinds.RAISES,),
    "property-finite": (kinds.NONFINITE, kinds.RANGE),
    "property-accuracy": (kinds.ACCURACY, kinds.DECISION, kinds.SHAPE),
    "property-compiled": (kinds.COMPILED,),
    "property-invariance": (kinds.INVARIANCE,),
}

_SHOWN = 600
"""Characters of an example in a message; the run's table and the written test have all of it."""

_HOLDS = {
    "property-finite": "finite inputs gave finite outputs",
    "property-accuracy": "every output agreed with the judge within what rounding explains",
    "property-compiled": "compiled code was no worse than eager mode",
}


def check_property(stats: PropertyStats, headroom: float) -> list[Finding]:
    """Every property that was asked for, the headroom that is left, and how much was looked at.

    headroom: warn from this factor below the format's maximum.
    """
    if not stats.breakings and not stats.elements:
        return [_nothing(stats)]
    found = []
    for slug, of_kind in _KINDS.items():
        check = REGISTRY[slug]
        broken = [one for one in stats.breakings if one.problem.kind in of_kind]
        found += [_failed(stats, check, one) for one in broken]
        if not broken and slug in stats.skipped:
            found.append(check.skip(who(stats), stats.skipped[slug]))
        elif not broken and slug == "property-invariance":
            found += _invariances(stats)
        elif not broken and slug in stats.asked:
            looked = f"{_HOLDS[slug]} ({_looked_at(stats, slug)})"
            observed = stats.ratio if slug == "property-accuracy" else 0.0
            unit = "of what is allowed" if slug == "property-accuracy" else "examples"
            limit = 1.0 if slug == "property-accuracy" else 0.0
            seen = stats.compiled_examples if slug == "property-compiled" else stats.elements
            found.append(check.passed(who(stats), looked, seen, observed=observed, limit=limit, unit=unit))
    return [*found, *_headroom(stats, headroom), _coverage(stats)]


def who(stats: PropertyStats) -> str:
    """The subject and its arm, as findings name them."""
    return f"{stats.subject} [{stats.arm}]"


def _failed(stats: PropertyStats, check: Check, breaking: Breaking) -> Finding:
    problem = breaking.problem
    value = f"output {problem.output}[{problem.index}]" if problem.output else f"element {problem.index} of the output"
    low, wide = describe_value(problem.low), describe_value(problem.wide)
    digits = next((n for n in (2, 3, 5) if f"{problem.allowed:.{n}g}" != f"{problem.observed:.{n}g}"), 9)
    within, away = f"{problem.allowed:.{digits}g}", f"{problem.observed:.{digits}g}"
    texts = {
        kinds.RAISES: f"what runs in float32 must run in {stats.format}; it raises {problem.detail}",
        kinds.NONFINITE: f"finite inputs must give finite outputs; {value} is {low}, and {wide} in {stats.reference}",
        kinds.RANGE: f"what the declared inputs give must fit into the output's format; {value} is {wide} in "
        f"{stats.reference}, and {low} here: no code mends that, only another format or other inputs",
        kinds.ACCURACY: f"the output must lie within {within} of {stats.reference}, which "
        f"{problem.roundings} roundings in {stats.format} explain; {value} is {low} and should be {wide}: "
        f"{away} away",
        kinds.DECISION: f"integers and bools must be those of {stats.reference}, unless rounding the data turns them "
        f"there too; {value} is {low} and should be {wide}",
        kinds.SHAPE: f"outputs must be those of {stats.reference}; {problem.output or 'the output'} is "
        f"{problem.detail}",
        kinds.COMPILED: f"compiled code must not be worse than eager mode; {_compiled(problem, value, low, wide)}",
        kinds.INVARIANCE: f"a declared invariance must hold; {problem.detail}: {value} is {low}, not {wide}",
    }
    looked = f"after {breaking.found_after} of {stats.budget} examples"
    if stats.cut:
        looked += "; making it smaller was cut short by the budget"
    if breaking.climbed:  # of a lone input, beyond what was drawn for it
        looked = f"by gradient ascent {stats.domain}, the declared domain, {looked}"
    message = f"{texts[problem.kind]}. The smallest input found is {_short(breaking.code)}, {looked}"
    hint = remedy(problem.kind, breaking.where.op)
    if breaking.file:
        hint = f"{hint}; run pytest {breaking.file}" if hint else f"run pytest {breaking.file}"
    if breaking.unwritten:
        hint = f"{hint}; no test was written: {breaking.unwritten}" if hint else breaking.unwritten
    unit = "elements" if problem.kind in (kinds.NONFINITE, kinds.RANGE, kinds.DECISION) else "absolute error"
    observed, limit = (problem.observed, problem.allowed) if problem.observed else (None, None)
    unit = unit if observed is not None else ""
    return check.fail(who(stats), message, where=breaking.where, observed=observed, limit=limit, unit=unit, hint=hint)


def _compiled(problem: kinds.Problem, value: str, low: str, wide: str) -> str:
    if problem.detail.startswith("it "):
        return problem.detail
    return f"{value} is {low} compiled and {wide} in float64; eager mode is nearer"


def _looked_at(stats: PropertyStats, check: str) -> str:
    count = stats.compiled_examples if check == "property-compiled" else _judged(stats)
    return f"{count:,} example{'s' * (count != 1)}, {stats.elements:,} elements"


def _judged(stats: PropertyStats) -> int:
    """Examples that were judged, those of gradient ascent included."""
    return stats.examples - stats.outside + stats.climbs


def _invariances(stats: PropertyStats) -> Iterator[Finding]:
    """Each invariance that was declared and is not broken; one that changed no input shows nothing."""
    check, subject, unit = PROPERTY_INVARIANCE, who(stats), "examples"
    for name, count in stats.invariances.items():
        if count:
            message = f"{name} held ({count:,} example{'s' * (count != 1)} that it changes)"
            yield check.passed(subject, message, count, observed=count, limit=1, unit=unit)
        elif stats.breakings:
            yield check.skip(subject, f"{name} was not looked at: another property breaks first")
        else:
            message = f"a declared invariance must be looked at, and {name} changed no input that could be judged"
            hint = "declare what changes the inputs, or draw inputs that it changes"
            yield check.fail(subject, message, observed=0, limit=1, unit=unit, hint=hint)


def _headroom(stats: PropertyStats, factor: float) -> list[Finding]:
    """How far the largest value that was found lies below the end of the format."""
    peak = stats.peak
    if any(one.problem.kind in (kinds.NONFINITE, kinds.RANGE) for one in stats.breakings):
        return []
    if stats.overflow is not None:
        return [_overflowed(stats, stats.overflow)]
    if not peak.magnitude:
        return []
    fmt = peak.format or stats.format
    room = format_of(fmt).max / peak.magnitude
    place = peak.where.module or _op(peak)
    message = (
        f"{stats.domain} the largest value found is {_magnitude(peak.magnitude)}{f' at {place}' if place else ''}; "
        f"{_magnitude(room)}x below the maximum of {fmt}"
    )
    if room >= factor:
        seen = _judged(stats)
        return [HEADROOM.passed(who(stats), message, seen, where=peak.where, observed=room, limit=factor, unit="times")]
    hint = f"larger inputs may overflow; it is reached with {_short(peak.code)}"
    return [HEADROOM.warn(who(stats), message, where=peak.where, observed=room, limit=factor, unit="times", hint=hint)]


def _overflowed(stats: PropertyStats, peak: Peak) -> Finding:
    """A value that left its format inside, although the output is as it should be."""
    op = _op(peak)
    place = f"{op} in {peak.where.module}" if peak.where.module else op
    message = (
        f"{stats.domain} every value inside must stay within its format; {place} makes an infinity of finite "
        f"{peak.format} values, which does not reach the output. It is reached with {_short(peak.code)}"
    )
    hint = "its gradient may be NaN or zero; scale before this op, or compute it in float32"
    return HEADROOM.warn(who(stats), message, where=peak.where, observed=0, limit=1, unit="times", hint=hint)


def _short(code: str) -> str:
    return code if len(code) <= _SHOWN else f"{code[:_SHOWN]}... ({len(code):,} characters)"


def _op(peak: Peak) -> str:
    return peak.where.op.removeprefix("aten::").partition(".")[0]


def _magnitude(value: float) -> str:
    """A large number in digits as long as a person reads them: 41,216, 1.6, 3.4e+38."""
    return f"{value:,.0f}" if 100 <= value < 1e7 else f"{value:.2g}"


def _coverage(stats: PropertyStats) -> Finding:
    notes = [f"looked at {stats.coverage}"]
    if stats.stopped:
        notes.append(f"{stats.examples} of {stats.budget} examples, since {stats.stopped}")
    notes += [f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items()]
    total, text = stats.coverage.total, "; ".join(notes)
    if stats.outside <= stats.examples / 2:
        unit = "observations"
        return COVERAGE.passed(who(stats), text, total, observed=total, limit=1, unit=unit)
    return COVERAGE.warn(who(stats), text, observed=total, limit=1, unit="observations")


def _nothing(stats: PropertyStats) -> Finding:
    if stats.lacking:
        return COVERAGE.skip(who(stats), f"not judged: {cannot_run(stats.lacking)}")
    message = f"a verdict needs evidence; of {stats.examples} examples none could be judged"
    notes = []
    if stats.unsteady:
        notes.append(stats.unsteady)
    elif stats.outside:
        notes.append(f"float32 or the judge raises {stats.outside_reason}")
    unseen = stats.coverage.unseen.items()
    notes += [f"{why} ({count}x)" for why, count in unseen if not why.startswith("examples that float32")]
    if stats.examples > stats.outside and not notes:
        notes.append("no output has an element")
    if stats.stopped:
        notes.append(stats.stopped)
    message += f": {'; '.join(notes)}" if notes else ""
    hint = "draw finite inputs that the function takes, and give tensors or numbers"
    return COVERAGE.fail(who(stats), message, observed=0, limit=1, unit="examples", hint=hint)
