"""The first version in which each verdict changed, as a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator

from ampcheck.checks import explain
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Scalar, Table, Verdict, Where
from ampcheck.core.text import counted, listed
from ampcheck.tools.bisect.history import History
from ampcheck.tools.sweep.results import JUDGED


def judge_history(history: History, check: str = "", progress: Progress = silent) -> Run:
    """Search for the first version in which the verdict of a check changed, by default of each check that changed.

    The findings have the later verdict; one that cannot be narrowed down to a version is undecided, and a check with a
    verdict at one end of the range alone is incomplete coverage. Raises `UsageError` for an unknown check, and where
    the first or the last version has no verdict.
    """
    if check:
        explain(check)  # raises for an unknown one
    if history.speed is not None:
        check = "regression"
    last, noun = len(history.versions.known) - 1, history.versions.noun

    def verdict(number: int, slug: str) -> Verdict | None:
        if number not in history.results:
            done = len(history.results)
            progress(f"{noun} {history.versions.known[number]}", done, max(done + 1, history.looks))
        return history.verdicts(number).get(slug)

    for number in (0, last):
        if verdict(number, check) is None and history.forget_undecided([number]):
            verdict(number, check)
        _require_verdict(history, number, check)
    before, after = history.verdicts(0), history.verdicts(last)
    slugs = [check] if check else [slug for slug in before if slug in after]
    half_known = [] if check else sorted(before.keys() ^ after.keys())
    changed = [slug for slug in slugs if before[slug] != after[slug]]
    tables: dict[str, Table] = {}
    findings = [_finding(history, slug, verdict, tables) for slug in changed]
    findings += [_half_known(history, slug) for slug in half_known]
    findings = findings or [_unchanged(history, slugs)]
    return Run(
        environment=history.results[last].run.environment,
        findings=tuple(findings),
        coverage=Coverage({f"{noun}s": last + 1, f"judged {noun}s": len(history.results)}),
        tables=(_table(history, [*changed, *half_known] or slugs), *tables.values()),
        title=f"bisection of {history.versions.target.target} over {counted(last + 1, f'{noun}s')}",
    )


def _require_verdict(history: History, number: int, check: str) -> None:
    result, version = history.result(number), history.versions.known[number]
    if result.ended != JUDGED:
        raise UsageError(f"both ends of the range need a verdict, and {version} has none: {result.reason}")
    if check and check not in history.verdicts(number):
        why = _why_none(history, number, check)
        raise UsageError(f"both ends of the range need a verdict of {check}, and {version} has none: {why}")


def _why_none(history: History, number: int, slug: str) -> str:
    """Why a version that was judged has no verdict of a check."""
    findings = history.result(number).run.by(slug)
    undecided = [finding for finding in findings if finding.verdict in (Verdict.UNDECIDED, Verdict.INCOMPLETE)]
    for finding in undecided or findings:
        return f"{finding.verdict}: {finding.message}"
    return "it does not apply"


def _half_known(history: History, slug: str) -> Finding:
    """The finding about a check that has a verdict at one end of the range alone."""
    last = len(history.versions.known) - 1
    known, unknown = (0, last) if slug in history.verdicts(0) else (last, 0)
    with_it, without_it = (history.versions.known[number] for number in (known, unknown))
    verdict, why = history.verdicts(known)[slug], _why_none(history, unknown, slug)
    text = f"{slug} is {verdict} in {with_it}, and {without_it} has no verdict of it: {why}"
    hint = "choose a range with a verdict of it at both ends, or search for another check by --check"
    return COVERAGE.incomplete(history.versions.target.target, text, hint=hint)


def _unchanged(history: History, slugs: list[str]) -> Finding:
    """The finding about verdicts that are the same at both ends of the range; incomplete without any."""
    first, last, name = history.versions.known[0], history.versions.known[-1], history.versions.target.target
    if not slugs:
        return COVERAGE.incomplete(name, f"no check has a verdict in {first} or in {last}: there is nothing to compare")
    if len(slugs) == 1:
        same = f"the verdict of {slugs[0]} is {history.verdicts(0)[slugs[0]]}"
    else:
        same = f"{len(slugs):,} verdicts are the same"
    text = f"{same} in {first} and in {last}: no {history.versions.noun} between them changed it"
    return COVERAGE.passed(name, text, 2)


def _finding(
    history: History, slug: str, verdict: Callable[[int, str], Verdict | None], tables: dict[str, Table]
) -> Finding:
    """tables: of what differs between the two versions, by title; they are added here."""
    known, noun, name = history.versions.known, history.versions.noun, history.versions.target.target
    low, high = first_change(len(known), lambda number: verdict(number, slug))
    if high - low > 1 and history.forget_undecided(range(low + 1, high)):
        low, high = first_change(len(known), lambda number: verdict(number, slug))
    before, after = verdict(low, slug), verdict(high, slug)
    both = [finding for number in (low, high) for finding in history.result(number).run.by(slug)]
    reason, differing = history.versions.explain(low, high, both, history.called(low) | history.called(high))
    tables.update({table.title: table for table in differing})
    if high - low > 1:
        between = listed((known[number].name for number in range(low + 1, high)), 3)
        text = f"changed from {before} to {after} in {known[high]} or before it: no verdict about {between}"
        text = f"{text}. {reason}" if reason else text
        return explain(slug).undecided(name, text, hint="mend what keeps them from being judged, or allow more time")
    example = next((finding for finding in both if finding.verdict is after), None)
    text = f"first changed from {before} to {after} in {known[high]}; the {noun} before it is {known[low]}"
    text = f"{text}. {reason[:1].upper()}{reason[1:]}" if reason else text
    where, hint = (example.where, example.hint) if example is not None else (Where(), "")
    if example is not None and after is not Verdict.PASS:
        text = f"{text}. Since then: {example.message}"
    return explain(slug).judged(after or Verdict.UNDECIDED, name, text, len(history.results), where=where, hint=hint)


def _table(history: History, slugs: list[str]) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for number in sorted(history.results):
        version, result = history.versions.known[number], history.results[number]
        known = history.verdicts(number)
        shown = ", ".join(f"{slug} {known[slug]}" if slug in known else f"{slug} undecided" for slug in slugs[:5])
        rows.append((version.name, version.title, result.reason or shown, result.seconds))
    noun, note = history.versions.noun, history.versions.note
    note = f"The oldest first. {note[:1].upper()}{note[1:]}." if note else "The oldest first."
    return Table(f"Judged {noun}s", (noun, "title", "verdicts", "seconds"), rows, note=note)


# The search by halves, on plain data ---------------------------------------------------------------------------------


def first_change(count: int, state: Callable[[int], Hashable | None]) -> tuple[int, int]:
    """Where the state of `count` items changes from that of the first: the last item before, the first one after.

    state: of an item by its number; None where it is not known, which is never read as either side. Those of the first
    and the last must be known, and differ. The two numbers are neighbours, unless the states of all items between them
    are unknown. Of several changes this finds one.
    """
    low, high, before = 0, count - 1, state(0)
    while high - low > 1:
        known = ((number, found) for number in _halves(low, high) if (found := state(number)) is not None)
        number, found = next(known, (low, None))
        if found is None:
            break
        low, high = (number, high) if found == before else (low, number)
    return low, high


def _halves(low: int, high: int) -> Iterator[int]:
    """The numbers between two: the middle, then the middles of both halves, and so on; neighbours fail together."""
    waiting = deque([(low, high)])
    while waiting:
        start, end = waiting.popleft()
        middle = (start + end) // 2
        if start < middle < end:
            yield middle
            waiting += [(start, middle), (middle, end)]
