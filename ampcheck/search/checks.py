"""What a search finds, and how much was examined."""

from __future__ import annotations

from ampcheck.catalog.numerics import COVERAGE
from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.text import cannot_run
from ampcheck.records.property import PropertyStats


def check_property(stats: PropertyStats, limits: Limits) -> list[Finding]:
    """Every property that was searched for, the headroom that is left, and how much was examined."""
    if not stats.breakings and not stats.elements:
        return [_nothing(stats)]
    return [*findings(stats, limits), _coverage(stats)]


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
