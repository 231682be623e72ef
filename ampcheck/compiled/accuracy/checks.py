"""What is judged of compiled code beside eager mode and float64, and the coverage of that."""

from __future__ import annotations

from collections.abc import Collection

from ampcheck.catalog.numerics import COVERAGE
from ampcheck.checks import findings
from ampcheck.checks.compile import compiled_dtype, compiled_error, compiled_exception, compiled_gradient
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding, Verdict, Where
from ampcheck.records.accuracy import AccuracyStats

EXCEPTION = compiled_exception.CHECK.slug
CHECKS = (EXCEPTION, compiled_dtype.CHECK.slug, compiled_error.CHECK.slug, compiled_gradient.CHECK.slug, COVERAGE.slug)
"""The names of the checks."""


def check_accuracy(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks, all by default; exceptions and coverage are always among them."""
    return [*findings(stats, limits, None if checks is None else {*checks, EXCEPTION}), *check_coverage(stats)]


def check_coverage(stats: AccuracyStats) -> list[Finding]:
    """Something was compiled and compared."""
    unseen = "; ".join(f"{reason} ({count}x)" for reason, count in stats.coverage.unseen.items())
    raised, subject = stats.exceptions, stats.name
    if raised.eager and raised.compiled and not raised.missing:
        message = f"the subject must run to its end; eager mode raises {raised.eager}, and compiled code raises too"
        hint = "give inputs with which the model runs, and an optimizer that takes its parameters"
        return [COVERAGE.fail(subject, message, where=raised.where, hint=hint)]
    if raised.eager or raised.compiled:
        return [COVERAGE.skip(subject, "a run raised, so nothing was compared")]
    if not stats.graphs and stats.unsupported:
        return [COVERAGE.skip(subject, f"nothing was compiled, and so nothing judged: {stats.unsupported}")]
    if not stats.graphs:
        message = "the subject must compile at least one graph; torch.compile made none and everything ran eager"
        hint = "see TORCH_LOGS=graph_breaks, and whether the model is excluded by torch._dynamo.disable"
        where = Where("compile")
        return [COVERAGE.fail(subject, message, where=where, observed=0.0, limit=1.0, unit="graphs", hint=hint)]
    if stats.incomparable:
        return [COVERAGE.skip(subject, f"nothing was compared: {stats.incomparable}")]
    if not stats.errors:
        message = "a verdict needs evidence; no output, gradient or update was compared"
        hint = "give inputs with which the model computes something"
        return [COVERAGE.fail(subject, message, observed=0.0, limit=1.0, unit="tensors", hint=hint)]
    if not stats.comparable:
        verdict = Verdict.INCOMPLETE if any(e.nan for e in stats.errors) else Verdict.SKIP
        return [COVERAGE.finding(verdict, subject, f"nothing was compared: {unseen}")]
    text = f"looked at {stats.coverage}" + (f"; not looked at: {unseen}" if unseen else "")
    count = len(stats.comparable)
    return [COVERAGE.passed(subject, text, count, observed=count, limit=1.0, unit="tensors")]
