"""The policy of autocast: what the checks of it share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampcheck.core.check import Check
from ampcheck.core.run import Finding
from ampcheck.core.text import listed
from ampcheck.records.policy import PolicyCalls

_LISTED = 6
"""Modules, ops or lines that a message lists."""


def counted_modules(modules: Iterable[str]) -> str:
    """`2 modules: a, b`."""
    names = list(dict.fromkeys(modules))
    return f"{len(names)} module{'s' if len(names) != 1 else ''}: {listed_names(names)}"


def listed_names(names: Sequence[str]) -> str:
    """`a, b`; the longest lists are cut."""
    return listed((name or "(the root)" for name in names), _LISTED)


def floats(dtypes: str) -> set[str]:
    """The floating dtypes among those of a call."""
    words = dtypes.replace("[", " ").replace("]", " ").replace("|", " ").split()
    return {word for word in words if "float" in word}


def passed(check: Check, calls: PolicyCalls, text: str, seen: int) -> Finding:
    """A pass of a run that came to its end; else a skip."""
    if calls.raised is not None or not calls.calls:
        reason = f"the run raised {calls.raised.message}" if calls.raised else "no op reached autocast"
        return check.skip(calls.name, f"not judged: {reason}")
    return check.passed(calls.name, text, seen)
