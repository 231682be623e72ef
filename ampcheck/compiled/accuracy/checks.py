"""Judges compiled code against eager mode and float64."""

from __future__ import annotations

from collections.abc import Collection

from ampcheck.checks import findings
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.records.accuracy import AccuracyStats

EXCEPTION = "compiled-exception"
CHECKS = (EXCEPTION, "compiled-dtype", "compiled-error", "compiled-gradient", "coverage")
"""The names of the checks."""


def check_accuracy(stats: AccuracyStats, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """The findings of the named checks, all by default; exceptions and coverage are always among them."""
    return findings(stats, limits, None if checks is None else {*checks, EXCEPTION, "coverage"})
