"""The checks that the user selects: those that can judge the subject, and a reason for each that reported nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ampcheck.catalog import REGISTRY, for_kind
from ampcheck.catalog.compiled import COMPILED_ERROR
from ampcheck.catalog.numerics import DTYPE
from ampcheck.core.arguments import parse_checks
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.core.subject import Kind, Subject


def select_checks(checks: Collection[str] | None, subject: Subject) -> tuple[str, ...] | None:
    """The names of the selected checks, None for all. Raises `UsageError` for an unknown one, an empty selection, and
    one of which no check judges subjects of this kind."""
    selected = parse_checks(checks, dict.fromkeys(slug for kind in Kind for slug in for_kind(kind)))
    kinds = for_kind(subject.kind)
    if selected is not None and not set(selected) & set(kinds):
        raise UsageError(
            f"{subject.name} is of kind '{subject.kind.value}', which is judged by {', '.join(kinds)}; "
            f"asked for was {', '.join(selected)}"
        )
    return selected


def with_skips(run: Run, subject: Subject, checks: Collection[str] | None, *, compiles: bool) -> Run:
    """The run, with a skip for each selected check that reported nothing. compiles: whether compiled runs took part."""
    reported = {finding.check for finding in run.findings}
    silent = [slug for slug in checks or () if slug not in reported]
    skips = [REGISTRY[slug].skip(subject.name, f"not judged: {_reason(slug, subject, compiles)}") for slug in silent]
    return replace(run, findings=(*run.findings, *skips))


def _reason(slug: str, subject: Subject, compiles: bool) -> str:
    if slug not in for_kind(subject.kind):
        return f"{subject.name} is of kind '{subject.kind.value}', to which this check does not apply"
    if not compiles and REGISTRY[slug].family == COMPILED_ERROR.family:
        return "compile=False leaves compiled runs out"
    if slug == DTYPE.slug and not subject.dtypes:
        return "the subject declares no dtypes, Subject(..., dtypes={module: dtype})"
    return "the run had nothing that this check looks at"
