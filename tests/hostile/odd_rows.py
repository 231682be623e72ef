"""The table of odd subjects: what is handed in, and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Report:
    """What the user is promised.

    `outcome`: `refused` (a `UsageError` that matches `phrase`), `fails` (at least the checks named fail), `incomplete`
    or `warns` (nothing fails, at least the checks named have this verdict), `passes` (nothing fails, warns or is
    incomplete, and outputs or ops were looked at) or `raises` (`error` goes through). A `phrase` stands in a message
    of one of the checks named.
    """

    outcome: str
    phrase: str = ""
    checks: tuple[str, ...] = ()
    error: type[BaseException] | None = None


def refused(phrase: str) -> Report:
    return Report("refused", phrase)


def fails(*checks: str, phrase: str = "") -> Report:
    return Report("fails", phrase, checks)


def incomplete(*checks: str, phrase: str = "") -> Report:
    return Report("incomplete", phrase, checks)


def warns(*checks: str, phrase: str = "") -> Report:
    return Report("warns", phrase, checks)


def raises(error: type[BaseException]) -> Report:
    return Report("raises", error=error)


PASSES = Report("passes")

ROWS: dict[str, tuple[Callable[[], Any], Report]] = {}


def row(report: Report, name: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function that makes a subject to the table."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        title = name or make.__name__
        assert title not in ROWS, title
        ROWS[title] = make, report
        return make

    return add


def add(name: str, report: Report, make: Callable[[], Any]) -> None:
    row(report, name)(make)


class Base(torch.nn.Module):
    """A healthy module; the odd ones change one thing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def given(module: Any, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    return module, args or (torch.randn(3, 4),)


def module(forward: Callable[[Any, torch.Tensor], Any], **attributes: Any) -> Any:
    """An instance of `Base` with another forward and class attributes."""
    return type("Odd", (Base,), {"forward": forward, "__module__": __name__, **attributes})()


def is_low() -> bool:
    """Whether the run is the one in low precision."""
    return torch.is_autocast_enabled("cpu")
