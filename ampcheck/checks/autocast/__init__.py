"""Shared words of the checks of a guard, which judge how code uses autocast."""

from __future__ import annotations

from collections.abc import Iterable

from ampcheck.core.check import Check
from ampcheck.core.run import Finding
from ampcheck.core.text import counted
from ampcheck.records.autocast import Call, GuardStats


def of_kind(stats: GuardStats, how: str) -> list[tuple[Call, int]]:
    """The calls of one kind, and how often each was seen."""
    return [(call, count) for call, count in stats.calls.items() if call.how == how]


def recast(stats: GuardStats, how: str) -> list[tuple[Call, int]]:
    """Those whose dtypes autocast would have changed."""
    return [(call, count) for call, count in of_kind(stats, how) if call.expected]


def names(dtypes: Iterable[str]) -> str:
    """The dtypes in words, each once."""
    return " and ".join(dict.fromkeys(dtypes)) or "no float"


def clean(check: Check, stats: GuardStats, what: str, reason: str, message: str = "looked at {}") -> Finding:
    """A pass on what was counted as `what`; a skip for this reason where there was none."""
    seen = stats.counts.get(what, 0)
    text = message.format(counted(seen, what))
    return check.passed(stats.subject, text, seen) if seen else skipped(check, stats, reason)


def skipped(check: Check, stats: GuardStats, reason: str) -> Finding:
    """A skip of a block in which there was nothing that the check judges."""
    return check.absent(stats.subject, f"nothing was looked at: {reason}")
