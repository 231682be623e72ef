"""Versions for a bisection, in their order, each of which can be placed so that a process runs the target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ampcheck.core.run import Finding, Table
from ampcheck.core.settings import Target
from ampcheck.speed.base.checkout import Checkout, Sources


@dataclass(frozen=True, slots=True)
class Version:
    """One of them. key: identifies it in results that are kept; title: what is known about it, or ""."""

    key: str
    name: str
    title: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.title})" if self.title else self.name


@dataclass(frozen=True)
class Versions(ABC):
    """Versions of the code, or of what it runs on, the oldest first.

    target: as the user named it. noun: of one version. note: a sentence for the reader, or "". repository: the folder
    of the user's checkout, from which nothing may be imported; empty where it is the code that runs.
    """

    target: Target
    known: tuple[Version, ...]
    noun: str
    note: str = ""
    repository: str = ""

    @property
    def changes_policy(self) -> bool:
        """True if autocast may treat an op otherwise in another version."""
        return False

    @abstractmethod
    def identity(self, number: int) -> Mapping[str, Any]:
        """The fields of a `Task` that name a version."""

    @abstractmethod
    def placed(self, number: int) -> AbstractContextManager[Checkout]:
        """Where and with which interpreter the target runs. Raises `UsageError` for a version that cannot be had."""

    def sources(self, number: int) -> Sources:
        """The Python files of the user's own that a version has in a checkout; none where there is no checkout."""
        return Sources({})

    def changed(self, number: int) -> frozenset[str]:
        """The files of the user's own that differ between the first version and this one."""
        return frozenset()

    def explain(self, low: int, high: int, findings: Sequence[Finding], ops: frozenset[str]) -> tuple[str, list[Table]]:
        """A clause on why a verdict differs between two versions, or "", and tables of what differs.

        findings: of the check, in both. ops: overloads that the target sends through autocast in either.
        """
        return "", []

    def estimate(self, looks: int) -> str:
        """Return what a search that judges so many versions needs of time and disk, or "" for little of both.

        Raises `UsageError` where the disk is too small.
        """
        return ""

    def done(self, number: int) -> None:  # noqa: B027  # most need nothing
        """A version was judged: remove what it needed, if that was asked for."""

    def close(self) -> None:  # noqa: B027  # most need nothing
        """The search is over: remove what all of them needed, if that was asked for."""
