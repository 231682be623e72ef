"""Traits and rules that other packages add for ops of their own, as entry points `ampcheck.ops`.

An entry point is an object, such as a module, with `TRAITS`, rows as in `ampcheck.ops.table`, or `RULES`, functions as
in `ampcheck.shadow.rules` by the name of the op, or both. Names have a namespace: `mine::norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.extensions import Extension, extensions
from ampcheck.ops.table import ROWS, rows_of

GROUP = "ampcheck.ops"


def added_ops() -> tuple[Extension, ...]:
    """The entry points, each with its traits and rules as value, and those that are broken."""
    return extensions(GROUP, _accepted)


@cache
def added_traits() -> Mapping[str, Mapping[str, Any]]:
    """The rows of traits of other packages, by the name of the op."""
    return {name: row for one in added_ops() if one.value is not None for name, row in one.value[0].items()}


@cache
def added_rules() -> Mapping[str, Callable[..., Any]]:
    """The rules of other packages, by the name of the op."""
    return {name: rule for one in added_ops() if one.value is not None for name, rule in one.value[1].items()}


def _accepted(added: Any) -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Callable[..., Any]]]:
    """Raises `UsageError` for an entry point that cannot be used."""
    traits, rules = rows_of(getattr(added, "TRAITS", "")), dict(getattr(added, "RULES", {}))
    if not traits and not rules:
        raise UsageError("it must have TRAITS, RULES or both")
    known = {word for row in ROWS.values() for word in row}
    if unknown := [word for row in traits.values() for word in row if word not in known]:
        raise UsageError(f"TRAITS names {unknown[0]!r}, which is no trait; there are {', '.join(sorted(known))}")
    if wrong := [name for name in (*traits, *rules) if "::" not in name or name.startswith("aten::")]:
        raise UsageError(f"{wrong[0]!r} must be an op of your own with its namespace, such as 'mine::norm'")
    if wrong := [name for name, rule in rules.items() if not callable(rule)]:
        raise UsageError(f"the rule of {wrong[0]} must be a function rule(call, side)")
    return traits, rules
