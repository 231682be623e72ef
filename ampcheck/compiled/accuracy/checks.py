"""Judges compiled code against eager mode and float64."""

from __future__ import annotations

from collections.abc import Collection

from ampcheck.checks import findings
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.checks.compile import compiled_dtype, compiled_error, compiled_exception, compiled_gradient
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.records.accuracy import AccuracyStats

EXCEPTION = compiled_exception.CHECK.slug
CHECKS = (EXCEPTION, compiled_dtype.CHECK.slug, compiled_error.CHECK.slug, compiled_gradient.CHECK.slug, COVERAGE.slug)
"""The names of the checks."""


def check_accuracy(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks, all by default; exceptions and coverage are always among them."""
    return findings(stats, limits, None if checks is None else {*checks, EXCEPTION, COVERAGE.slug})
