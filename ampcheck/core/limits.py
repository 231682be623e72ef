"""The limits a repository may set, in `[tool.ampcheck]` of its `pyproject.toml`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ampcheck.core.arguments import show
from ampcheck.core.errors import UsageError
from ampcheck.core.json_files import conflict_in


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the checks. Each is a pure number; the defaults follow from the formats.

    precision: standard deviations of rounding that an error may reach, see `ampcheck explain precision-loss`. 2 is the
        usual 95 per cent; larger values scale every limit, smaller ones those of whole outputs and gradients.
    headroom: warn from this factor below the format's maximum. 4 is two binades: a batch four times as large in
        magnitude, or sixteen times as many terms of random sign in a sum, would overflow.
    flush: the part of a tensor's Euclidean norm that may be lost to zero and subnormal numbers, in unit roundoffs of
        the format. A single rounding changes as much as 1.
    underflow: the share of a tensor's nonzero gradient elements that may become zero.
    stagnation: the share of a tensor's updates that may change no weight.
    reduction: the error that a sum or norm of gradients may have, in roundings.
    """

    precision: float = 2.0
    headroom: float = 4.0
    flush: float = 1.0
    underflow: float = 0.1
    stagnation: float = 0.9
    reduction: float = 4.0

    def with_(self, values: Mapping[str, Any], source: str) -> Limits:
        """These limits with some replaced. Raises `UsageError` for an unknown name or an invalid value."""
        names = [f.name for f in fields(self)]
        for name, value in values.items():
            if name not in names:
                raise UsageError(f"{source} sets an unknown limit {name!r:.40}; there are {', '.join(names)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
                raise UsageError(f"{source} sets {name} to {show(value)}; a positive number is required")
        return replace(self, **{name: float(value) for name, value in values.items()})


def resolve_limits(limits: Limits | None) -> Limits:
    """The limits that were passed, by default those of `load_limits()`. Raises `UsageError` for another type."""
    if limits is None:
        return load_limits()
    if not isinstance(limits, Limits):
        raise UsageError(f"limits must be ampcheck.Limits(...); found a {type(limits).__name__}")
    return limits


def load_limits(start: Path | None = None) -> Limits:
    """The limits of the nearest `pyproject.toml` at or above `start` (the working directory); defaults without one.

    Raises `UsageError` for a file that cannot be read, unknown names and invalid values.
    """
    folder = (start or Path.cwd()).resolve()
    for parent in (folder, *folder.parents):
        if (path := parent / "pyproject.toml").is_file():
            return _parse(path)
    return Limits()


def _parse(path: Path) -> Limits:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        whole = tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{path.name} cannot be read: its arrays or tables nest too deep; write them flat") from None
    except (OSError, ValueError) as error:
        reason = str(error)  # tomllib repeats keys of any length
        reason = reason if len(reason) <= 300 else f"{reason[:220]} … {reason[-70:]}"
        raise UsageError(f"{path.name} cannot be read: {conflict_in(text) or reason}") from error
    table = _table(_table(whole, "tool", path), "ampcheck", path)
    if unknown := set(table) - {"limits"}:
        raise UsageError(
            f"[tool.ampcheck] of {path.name} has an unknown key {sorted(unknown)[0]!r:.40}; there is limits"
        )
    return Limits().with_(_table(table, "limits", path), f"[tool.ampcheck.limits] of {path.name}")


def _table(holder: Mapping[str, object], key: str, path: Path) -> Mapping[str, object]:
    table = holder.get(key, {})
    if not isinstance(table, dict):
        raise UsageError(f"{key!r} in {path.name} is a {type(table).__name__}; a table is required")
    return table
