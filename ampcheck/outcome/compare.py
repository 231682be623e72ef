"""A run against an earlier one: what is new, worse, gone, no longer judged, or unchanged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal, TypeAlias

from ampcheck.core.errors import UsageError
from ampcheck.core.run import FAIL_ON, SEVERITY, Finding, Run, Table, Verdict
from ampcheck.core.source import Place, place_of
from ampcheck.outcome.accept import with_accepted_causes
from ampcheck.outcome.baseline import judged_by
from ampcheck.report.text import quantity

FACTOR = 1.5
"""A finding is worse if it is so many times further beyond its limit than before."""

State: TypeAlias = Literal["new", "worse", "gone", "no longer judged", "unchanged"]

_STATES: tuple[State, ...] = ("new", "worse", "gone", "no longer judged", "unchanged")
_COMPARED = (*FAIL_ON["incomplete"], Verdict.ACCEPTED)
_UNCHANGED = "not new: the earlier run has it, too"


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a problem between two runs; `before` or `now` is None where there was or is none at its place."""

    state: State
    before: Finding | None
    now: Finding | None


def compare(old: Run, new: Run, folder: Path, *, factor: float = FACTOR) -> Run:
    """The new run, in which only problems that are new or worse fail or warn, with a table of the changes.

    Problems are matched by `place_of`, so that lines may move; of several at one place the worst with the worst.
    Unchanged ones are `ACCEPTED`. Worse is a worse verdict, or an observed value that is more than `factor` times
    further beyond the limit (their ratio; their difference where one is zero or the signs differ). A problem is gone if
    its check judged its subject in the new run. What follows from another finding changes with it.
    folder: to which places are relative. Raises `UsageError` for a factor below 1.
    """
    if not factor >= 1:
        raise UsageError(f"the factor by which a finding is worse must be at least 1; found {factor:g}")
    old, new = (replace(run, findings=tuple(with_accepted_causes(run.findings, run.findings))) for run in (old, new))
    changes = list(_changes(old, new, folder, factor))
    state_of = {id(change.now): change for change in changes}
    findings = [_judged(finding, state_of.get(id(finding))) for finding in new.findings]
    counts = Counter(change.state for change in changes)
    rows = [_row(change) for state in _STATES[:-1] for change in changes if change.state == state]
    table = Table(
        ", ".join(f"{counts[state]:,} {state}" for state in _STATES),
        ("state", "check", "subject", "where", "before", "now"),
        rows,
        note=f"Worse: a worse verdict, or more than {factor:g} times further beyond the limit.",
    )
    title = f"{new.title or 'a run'} against {old.title if old.title != new.title else 'an earlier run'}"
    judged = tuple(with_accepted_causes(new.findings, findings))
    return replace(new, findings=judged, tables=(table, *new.tables), title=title)


def _changes(old: Run, new: Run, folder: Path, factor: float) -> Iterator[Change]:
    """A change for each problem of the new run that is a cause, and for each of the old one that is there no more."""
    before, now = _by_place(old.findings, folder), _by_place(new.findings, folder)
    judged = judged_by(new.findings)
    for place in dict.fromkeys((*now, *before)):
        for was, finding in zip_longest(before.get(place, ()), now.get(place, ())):
            if finding is None and not was.cause:
                gone: State = "gone" if (was.check, was.subject) in judged else "no longer judged"
                yield Change(gone, was, None)
            elif finding is not None and not finding.cause:
                accepted = finding.verdict is Verdict.ACCEPTED
                worse: State = "new" if was is None else "worse" if _is_worse(was, finding, factor) else "unchanged"
                yield Change("unchanged" if accepted else worse, was, finding)


def _by_place(findings: Iterable[Finding], folder: Path) -> dict[Place, list[Finding]]:
    """The problems at each place, worst first."""
    places: dict[Place, list[Finding]] = {}
    for finding in findings:
        if finding.verdict in _COMPARED:
            places.setdefault(place_of(finding, folder), []).append(finding)
    for group in places.values():
        group.sort(key=lambda finding: (SEVERITY.index(finding.verdict), -_beyond(finding, ratio=_has_ratio(finding))))
    return places


def _is_worse(was: Finding, now: Finding, factor: float) -> bool:
    if was.verdict is not now.verdict:
        return SEVERITY.index(now.verdict) < SEVERITY.index(was.verdict)
    if was.unit != now.unit or None in (was.observed, was.limit, now.observed, now.limit):
        return False
    ratio = _has_ratio(was) and _has_ratio(now)
    return _beyond(now, ratio=ratio) > factor * _beyond(was, ratio=ratio)


def _has_ratio(finding: Finding) -> bool:
    return (finding.observed or 0.0) * (finding.limit or 0.0) > 0


def _beyond(finding: Finding, *, ratio: bool) -> float:
    """Return how far the observed value is from its limit, on either side, as a limit may be the least or the most; 0
    where one is unknown."""
    observed, limit = finding.observed, finding.limit
    if observed is None or limit is None:
        return 0.0
    if not math.isfinite(observed) or not math.isfinite(limit):
        return math.inf
    return max(observed / limit, limit / observed) if ratio else abs(observed - limit)


def _judged(finding: Finding, change: Change | None) -> Finding:
    if change is None or change.state == "new" or finding.verdict is Verdict.ACCEPTED:
        return finding
    if change.state == "unchanged":
        return replace(finding, verdict=Verdict.ACCEPTED, accepted=_UNCHANGED)
    return replace(finding, message=f"{finding.message} (worse: it was {_brief(change.before)})")


def _row(change: Change) -> tuple[str, ...]:
    finding = change.now or change.before
    assert finding is not None
    return (
        change.state,
        finding.check,
        finding.subject,
        str(finding.where),
        _brief(change.before),
        _brief(change.now),
    )


def _brief(finding: Finding | None) -> str:
    """`fail, 129 elements`."""
    return "" if finding is None else f"{finding.verdict}, {quantity(finding.observed, finding.unit)}".rstrip(", ")
