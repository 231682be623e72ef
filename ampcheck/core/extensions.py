"""Extensions that installed packages add to ampcheck, under entry points of groups such as `ampcheck.checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ampcheck.core.errors import brief


@dataclass(frozen=True, slots=True)
class Extension:
    """One entry point. package: the distribution that has it, with its version. value: what it adds, None where it is
    broken; error: why it is."""

    group: str
    name: str
    package: str
    value: Any = None
    error: str = ""

    def __str__(self) -> str:
        return f"entry point {self.name!r} of {self.group} ({self.package})"


_LOADED: dict[str, tuple[Extension, ...]] = {}


def extensions(group: str, accept: Callable[[Any], Any]) -> tuple[Extension, ...]:
    """The entry points of a group, by name; they are loaded once.

    accept: gives what an object adds, and raises where that cannot be used.
    """
    if group not in _LOADED:
        _LOADED[group] = tuple(_load(group, accept))
    return _LOADED[group]


def broken() -> list[Extension]:
    """The entry points that failed to load so far."""
    return [extension for group in _LOADED.values() for extension in group if extension.error]


def _load(group: str, accept: Callable[[Any], Any]) -> Iterator[Extension]:
    from importlib.metadata import entry_points

    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown package"
        try:
            yield Extension(group, point.name, package, accept(point.load()))
        except Exception as error:  # noqa: BLE001  # whatever it raises, the checks of ampcheck go on
            yield Extension(group, point.name, package, error=brief(error))
