"""Parsers of arguments: each returns a value of the type it is named for, or raises `UsageError`.

The error says which argument, what it requires and what it found. `None` is accepted only where a parser says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypeAlias

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.text import is_number as is_number

if TYPE_CHECKING:
    import torch

DType: TypeAlias = "str | torch.dtype"

LOW = ("float16", "bfloat16")
"""The formats that autocast casts to."""


def parse_integer(value: object, name: str, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number, {least} or more; found {show(value)}")
    return value


def parse_number(value: object, name: str, *, below: float = math.inf) -> float:
    """A number above 0 and below `below`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} must be a number; found {show(value)}")
    if not 0 < value < below:
        bound = "above 0" + (f" and below {below:g}" if below < math.inf else "")
        raise UsageError(f"{name} must be a finite number {bound}; found {show(value)}")
    return float(value)


def parse_flag(value: object, name: str) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False; found {show(value)}")
    return value


def parse_choice(value: object, name: str, choices: Collection[str]) -> str:
    """One of several names."""
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}; found {show(value)}")
    return value


def parse_names(values: str | Iterable[str] | None, name: str, choices: Collection[str]) -> tuple[str, ...]:
    """Names out of `choices`, each once and in the order given; all of them for None."""
    if values is None:
        return tuple(choices)
    items = (values,) if isinstance(values, str) else tuple(values)
    return tuple(dict.fromkeys(parse_choice(value, name, choices) for value in items))


def parse_checks(values: str | Iterable[str] | None, choices: Collection[str]) -> tuple[str, ...] | None:
    """The names of the selected checks, None for all. Raises `UsageError` for an empty selection."""
    if values is None:
        return None
    names = parse_names(values, "checks", choices)
    if not names:
        raise UsageError("checks selects nothing: name a check, or leave it out to judge by all")
    return names


def parse_dtypes(values: DType | Iterable[DType], choices: Collection[str] = LOW) -> list[str]:
    """The names of one floating-point dtype or several, each once: `float16`, `torch.float16`, `half`."""
    several = isinstance(values, (list, tuple, set, frozenset))
    names = [format_of(value).name for value in (values if several else (values,))]  # type: ignore[arg-type,union-attr]
    wrong = [name for name in names if name not in choices]
    if wrong or not names:
        raise UsageError(f"dtype must be one of {', '.join(choices)}; found {wrong[0] if wrong else 'none'}")
    return list(dict.fromkeys(names))


def show(value: object) -> str:
    """A value in at most 60 characters."""
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python refuses to print thousands of digits
        return "an integer of thousands of digits"
    return f"a {type(value).__name__}" if isinstance(value, (dict, list, tuple, set)) else f"{value!r:.60}"
