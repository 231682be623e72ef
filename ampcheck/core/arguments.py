"""Parsers of arguments: each returns a value of the type it is named for, or raises `UsageError`.

The error says which argument, what it requires and what it found. `None` is accepted only where a parser says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypeAlias

from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of

if TYPE_CHECKING:
    import torch

DType: TypeAlias = "str | torch.dtype"

LOW = ("float16", "bfloat16")
"""The formats that autocast casts to."""


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_integer(value: object, name: str, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number, {least} or more; found {show(value)}")
    return value


def parse_number(value: object, name: str, *, least: float = 0.0, below: float = math.inf, zero: bool = False) -> float:
    """A number above `least` (`zero`: or equal to it) and below `below`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} must be a number; found {show(value)}")
    if not (least <= value if zero else least < value) or not value < below:
        bound = f"{'at least' if zero else 'above'} {least:g}" + (f" and below {below:g}" if below < math.inf else "")
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


def parse_dtype(value: DType, name: str = "dtype", choices: Collection[str] = LOW) -> str:
    """The name of a floating-point dtype, given as a string (`float16`, `torch.float16`, `half`) or a `torch.dtype`."""
    format_name = format_of(value).name
    if format_name not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}; found {format_name}")
    return format_name


def parse_dtypes(values: DType | Iterable[DType], name: str = "dtype", choices: Collection[str] = LOW) -> list[str]:
    """The names of one dtype or several, each once."""
    several = isinstance(values, (list, tuple, set, frozenset))
    dtypes = list(values) if several else [values]  # type: ignore[arg-type]
    if not dtypes:
        raise UsageError(f"{name} must name at least one of {', '.join(choices)}; found none")
    return list(dict.fromkeys(parse_dtype(value, name, choices) for value in dtypes))  # type: ignore[arg-type]


def show(value: object) -> str:
    """A value in at most 60 characters."""
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python refuses to print thousands of digits
        return "an integer of thousands of digits"
    return f"a {type(value).__name__}" if isinstance(value, (dict, list, tuple, set)) else f"{value!r:.60}"
