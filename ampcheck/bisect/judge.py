"""The first commit in which each verdict changed, as a run."""

from __future__ import annotations

from collections.abc import Callable

from ampcheck.bisect.history import History
from ampcheck.bisect.search import first_change
from ampcheck.catalog import explain
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Scalar, Table, Verdict, Where
from ampcheck.core.text import counted, listed
from ampcheck.sweep.results import JUDGED


def judge_history(history: History, check: str = "", progress: Progress = silent) -> Run:
    """Search the history for the first commit in which the verdict of a check changed, of each that changed by default.

    The findings have the later verdict; one that cannot be narrowed down to a commit is undecided. Raises `UsageError`
    for an unknown check, and where the first or the last commit has no verdict.
    """
    if check:
        explain(check)  # raises for an unknown one
    last = len(history.commits) - 1

    def verdict(number: int, slug: str) -> Verdict | None:
        if number not in history.results:
            done = len(history.results)
            progress(f"commit {history.commits[number]}", done, max(done + 1, 2 + (last - 1).bit_length()))
        return history.verdicts(number).get(slug)

    for number in (0, last):
        verdict(number, check)
        _require_verdict(history, number, check)
    before, after = history.verdicts(0), history.verdicts(last)
    slugs = [check] if check else [slug for slug in before if slug in after]
    changed = [slug for slug in slugs if before[slug] != after[slug]]
    findings = [_finding(history, slug, verdict) for slug in changed]
    if not findings:
        of = (
            f"the verdict of {check} is {before[check]}" if check else f"{counted(len(slugs), 'verdicts')} are the same"
        )
        text = f"{of} in {history.commits[0]} and in {history.commits[last]}: no commit between them changed it"
        findings = [COVERAGE.passed(history.target.target, text, 2)]
    return Run(
        environment=history.results[last].run.environment,
        findings=tuple(findings),
        coverage=Coverage({"commits": last + 1, "audited commits": len(history.results)}),
        tables=(_table(history, changed or slugs),),
        title=f"bisection of {history.target.target} over {counted(last, 'commits')}",
    )


def _require_verdict(history: History, number: int, check: str) -> None:
    result, commit = history.result(number), history.commits[number]
    if result.ended != JUDGED:
        raise UsageError(f"both ends of the range need a verdict, and {commit} has none: {result.reason}")
    if check and check not in history.verdicts(number):
        found = [finding for finding in result.run.findings if finding.check == check]
        why = f"{found[0].verdict}: {found[0].message}" if found else "it does not apply"
        raise UsageError(f"both ends of the range need a verdict of {check}, and {commit} has none: {why}")


def _finding(history: History, slug: str, verdict: Callable[[int, str], Verdict | None]) -> Finding:
    low, high = first_change(len(history.commits), lambda number: verdict(number, slug))
    before, after, name = verdict(low, slug), verdict(high, slug), history.target.target
    commit = history.commits[high]
    if high - low > 1:
        between = listed((history.commits[number].name for number in range(low + 1, high)), 3)
        text = f"changed from {before} to {after} in {commit} or before it: no verdict about {between}"
        return explain(slug).undecided(name, text, hint="mend what keeps them from being judged, or allow more time")
    example = next((f for f in history.result(high).run.findings if f.check == slug and f.verdict is after), None)
    text = f"first changed from {before} to {after} in {commit}; the commit before it is {history.commits[low]}"
    where, hint = (example.where, example.hint) if example is not None else (Where(), "")
    if example is not None and after is not Verdict.PASS:
        text = f"{text}. Since then: {example.message}"
    return explain(slug).judged(after or Verdict.UNDECIDED, name, text, len(history.results), where=where, hint=hint)


def _table(history: History, slugs: list[str]) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for number in sorted(history.results):
        commit, result = history.commits[number], history.results[number]
        known = history.verdicts(number)
        shown = ", ".join(f"{slug} {known[slug]}" if slug in known else f"{slug} undecided" for slug in slugs[:5])
        rows.append((commit.name, commit.title, result.reason or shown, result.seconds))
    return Table("Audited commits", ("commit", "title", "verdicts", "seconds"), rows, note="The oldest first.")
