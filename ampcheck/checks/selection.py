"""The checks that the user selects: those that can judge the subject, and a reason for each that reported nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ampcheck.checks import REGISTRY, for_kind
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.compile.compiled_error import CHECK as COMPILED_ERROR
from ampcheck.checks.dtype.dtype import CHECK as DTYPE
from ampcheck.core.arguments import parse_checks
from ampcheck.core.errors import UsageError
from ampcheck.core.extensions import broken
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Kind, Subject


def select_checks(checks: Collection[str] | None, subject: Subject) -> tuple[str, ...] | None:
    """The names of the selected checks, None for all. Raises `UsageError` for an unknown one, an empty selection, and
    one of which no check judges subjects of this kind."""
    selected = parse_checks(checks, dict.fromkeys([slug for kind in Kind for slug in for_kind(kind)]))
    kinds = for_kind(subject.kind)
    if selected is not None and not set(selected) & set(kinds):
        raise UsageError(
            f"{subject.name} is of kind '{subject.kind.value}', which is judged by {', '.join(kinds)}; "
            f"asked for was {', '.join(selected)}"
        )
    return selected


def unjudged(findings: Iterable[Finding], groups: Iterable[Collection[str]]) -> list[tuple[str, ...]]:
    """The groups of selected checks of which none has a verdict; one that ran and had nothing to look at has."""
    judged = {f.check for f in findings if f.verdict not in (Verdict.SKIP, Verdict.INCOMPLETE) or f.seen == 0}
    return [tuple(group) for group in groups if judged.isdisjoint(group)]


def with_unjudged(
    run: Run, groups: Iterable[Collection[str]], subject: str, reason: Callable[[str], str]
) -> tuple[Run, bool]:
    """The run, in which selected checks without a verdict are incomplete, and whether there are any.

    groups: of checks, of which one suffices. reason: why a check reported nothing.
    """
    lacking = unjudged(run.findings, groups)
    skipped = {slug for group in lacking for slug in group}
    findings = [
        replace(f, verdict=Verdict.INCOMPLETE) if f.check in skipped and f.verdict is Verdict.SKIP else f
        for f in run.findings
    ]
    reported = {finding.check for finding in findings}
    for group in lacking:
        if reported.isdisjoint(group):
            text = f"selected and not judged: {reason(group[0])}"
            findings.append(REGISTRY[group[0]].unjudged(subject, text))
    return replace(run, findings=tuple(findings)), bool(lacking)


def with_selected(run: Run, subject: Subject, checks: Collection[str] | None, *, compiles: bool) -> Run:
    """The run, in which selected checks without a verdict are incomplete, and extensions that are broken a warning.
    compiles: whether compiled runs took part."""
    groups = [(slug,) for slug in checks or ()]
    run = with_unjudged(run, groups, subject.name, lambda slug: _reason(slug, subject, compiles))[0]
    return replace(run, findings=(*run.findings, *broken_extensions(subject.name)))


def broken_extensions(subject: str) -> list[Finding]:
    """A warning for each entry point of another package that is left out."""
    hint = "mend or uninstall the package; `ampcheck doctor` lists what other packages add"
    return [COVERAGE.warn(subject, f"{one} is left out: {one.error}", hint=hint) for one in broken()]


def _reason(slug: str, subject: Subject, compiles: bool) -> str:
    if slug not in for_kind(subject.kind):
        return f"{subject.name} is of kind '{subject.kind.value}', to which this check does not apply"
    if not compiles and REGISTRY[slug].family == COMPILED_ERROR.family:
        return "compile=False leaves compiled runs out"
    if slug == DTYPE.slug and not subject.dtypes:
        return "the subject declares no dtypes, Subject(..., dtypes={module: dtype})"
    return "the run had nothing that this check looks at"
