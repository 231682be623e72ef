"""JSON, read strictly; and dataclasses as JSON, NaN and infinities included."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_Reader: TypeAlias = Callable[[Any, frozenset[str]], Any]

DEPTH = 64
"""Levels of nesting in JSON. Ours has ten; the code that reads it recurses."""

_BITS = 10_000
"""Of an integer; Python prints no number of more than 4,300 digits."""


def parse_json(text: str | bytes) -> Any:
    """JSON as data. Raises `ValueError`, whose message is one clause, for damage that `json.loads` accepts:

    a key that occurs twice in an object, as after a merge that kept both sides, and nesting beyond `DEPTH`. If git's
    conflict markers are the reason, the message says so.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        data = json.loads(text, object_pairs_hook=_object)
        _require_flat(data)
    except RecursionError:
        raise ValueError(f"it nests deeper than {DEPTH} levels") from None
    except ValueError as error:
        if isinstance(text, str) and (marker := conflict_in(text)):
            raise ValueError(marker) from error
        raise
    return data


def unread(error: OSError) -> str:
    """Return why a file cannot be read, in a clause."""
    texts = {FileNotFoundError: "there is no such file", IsADirectoryError: "it is a folder"}
    return texts.get(type(error)) or error.strerror or str(error)


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON in the file at `path`. Raises `OSError` or `ValueError`, whose message is one clause."""
    try:
        return parse_json(Path(path).read_bytes())
    except OSError as error:
        raise type(error)(unread(error)) from error
    except UnicodeDecodeError as error:
        raise ValueError("it is no text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON, or not all of it: {error}") from error


def conflict_in(text: str) -> str:
    """The first conflict marker of git in a file, as a clause; empty if there is none."""
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"(<{7}|>{7}|\|{7})( |$)", line):
            return f"line {number} is a conflict marker of git ({line.rstrip()[:40]!r}): resolve the merge"
    return ""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.80} occurs twice in one object, as after a merge that kept both sides")
    return data


def _require_flat(data: object) -> None:
    """Raise `RecursionError` beyond `DEPTH`, without recursion."""
    level = [data]
    for _ in range(DEPTH):
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return
        level = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    raise RecursionError


# Values and dataclasses ----------------------------------------------------------------------------------------------


def tag_nonfinite(value: object) -> Any:
    """JSON has no NaN and no infinity: they become {"float": "nan"}, which no other value equals."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}  # numpy's own repr would not be read back
    if isinstance(value, dict):
        return {key: tag_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [tag_nonfinite(item) for item in value]
    return value


def untag_nonfinite(value: object) -> Any:
    """The inverse of `tag_nonfinite`; lists become tuples."""
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: untag_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(untag_nonfinite(item) for item in value)
    return value


def to_plain(value: Any) -> Any:
    """A value as dicts, lists and scalars."""
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}  # asdict spoils a Counter
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[_T], data: object, always: frozenset[str] = frozenset()) -> _T:
    """The dataclass `kind` that `to_plain` and `untag_nonfinite` made `data` of, with each value of its annotated type.

    always: names of fields that must be there although they have a default. Raises `TypeError`, `KeyError` or
    `ValueError` for data that do not fit.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"a {kind.__name__} cannot be {data!r:.40}")
    readers = _readers(kind)  # type: ignore[arg-type]  # a class is hashable
    if missing := always & readers.keys() - data.keys():
        raise KeyError(min(missing))
    return kind(**{name: readers[name](data[name], always) for name in data})


@cache
def _readers(kind: type) -> dict[str, _Reader]:
    return {name: _reader(hint, f"{name} of a {kind.__name__}") for name, hint in get_type_hints(kind).items()}


def _reader(hint: Any, name: str) -> _Reader:
    """Reads a value as the annotation `hint` says: a dataclass, a sequence, a mapping, an enumeration or a scalar."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return lambda value, always: from_plain(hint, value, always)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda value, always: hint(value)
    collection = origin if isinstance(origin, type) and issubclass(origin, Iterable) else None
    mapping = collection is not None and issubclass(collection, Mapping)
    inner = _reader(arguments[mapping], name) if collection else None

    def read(value: object, always: frozenset[str]) -> Any:
        if inner is None and _is_scalar(value, arguments or (hint,)):
            return value
        if inner and mapping and isinstance(value, Mapping):
            return {key: inner(item, always) for key, item in value.items()}
        if inner and not mapping and isinstance(value, tuple):
            return tuple([inner(item, always) for item in value])
        raise TypeError(f"{name} cannot be {value!r:.40}")

    return read


def _is_scalar(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int):
        return (int in kinds and value.bit_length() <= _BITS) or (float in kinds and abs(value) <= sys.float_info.max)
    return isinstance(value, kinds)
