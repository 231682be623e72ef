"""The releases of a package from one to another, each in an environment of its own; the code is today's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion
from packaging.version import Version as Number

from ampcheck.autocast.policy import releases
from ampcheck.autocast.views import NONE, diff_view, source_of
from ampcheck.core.arguments import LOW
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Table, Verdict
from ampcheck.core.settings import Target
from ampcheck.core.text import counted, listed
from ampcheck.records.policy import release_of
from ampcheck.speed.base.checkout import Checkout
from ampcheck.tools.bisect.environments import Environments, published
from ampcheck.tools.bisect.versions import Version, Versions


@dataclass(frozen=True, kw_only=True)
class Releases(Versions):
    """The releases of a package. prune: remove each environment after its last use."""

    environments: Environments
    prune: bool = False
    refused: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Target, package: str, span: str, option: str, *, prune: bool = False) -> Releases:
        """The final releases of `A..B`: all that pip finds, or without a package index those that are on this machine.

        `2.6..2.9` includes 2.6.0 and every 2.9.x. Without B: up to the newest. option: that gave the range. Raises
        `UsageError` for another text, and for fewer than two releases.
        """
        first, dots, last = span.partition("..")
        example = "2.6..2.13" if option == "--torch" else "NAME==1.2..1.5"
        try:
            low, high = Number(first), Number(last) if last else None
        except InvalidVersion:
            low, high, dots = Number("0"), None, ""
        if not dots:
            raise UsageError(f"{option} takes a range of two releases, such as {example}; found {span!r}")
        package = canonicalize_name(package)
        environments, note = Environments(package), ""
        here = {*environments.kept(), environments.installed()} - {""}
        numbers = published(package)
        if not numbers:
            note = f"pip found no release of {package}: those that are on this machine were searched"
        final = (each for each in sorted({Number(text) for text in (*numbers, *here)}) if not each.is_prerelease)
        inside = [str(each) for each in final if low <= each and (high is None or each <= high or _starts(each, high))]
        if len(inside) < 2:
            what = f"{option} needs two releases of {package} from {first} to {last or 'the newest'}"
            there = f"there {'is' if len(inside) == 1 else 'are'} {listed(inside) or 'none'}"
            raise UsageError(f"{what}, and {there}; pip {f'has {listed(numbers, 3)}' if numbers else 'found none'}")
        known = tuple(Version(f"{package}=={number}", f"{package} {number}") for number in inside)
        return cls(target, known, "release", note, environments=environments, prune=prune)

    @property
    def changes_policy(self) -> bool:
        """PyTorch has the policies."""
        return self.environments.package == "torch"

    def identity(self, number: int) -> Mapping[str, Any]:
        """The package and the release; the code is that of the working tree."""
        return {"settings": (("requirement", self.known[number].key),)}

    @contextmanager
    def placed(self, number: int) -> Iterator[Checkout]:
        """An environment, which is made where there is none."""
        if number in self.refused:  # the first of a comparison of speed: pip is asked once
            raise UsageError(self.refused[number])
        try:
            python = self.environments.python(self._release(number))
        except UsageError as error:
            self.refused[number] = str(error)
            raise
        yield Checkout(Path.cwd(), Path.cwd(), (), self.target.target, python)

    def explain(self, low: int, high: int, findings: Sequence[Finding], ops: frozenset[str]) -> tuple[str, list[Table]]:
        """By the autocast policies of two releases of PyTorch: changed rules of ops that the target calls."""
        both = [release_of(self._release(number)) for number in (low, high)]
        if not self.changes_policy or both[0] == both[1] or not {*both} <= {*releases()}:
            return "", []
        dtype = (*self.target.dtype, *LOW)[0]
        device = self.target.device.partition(":")[0]
        first, second = (source_of(release, dtype) for release in both)
        if device not in first.devices or device not in second.devices:
            return "", []
        view = diff_view(first, second, device, device)
        changes = [
            (change["op"], *row[1:]) for change, row in zip(view.data["changes"], view.tables[0].rows, strict=True)
        ]
        blamed = {finding.where.op for finding in findings if finding.verdict is not Verdict.PASS and finding.where.op}
        names = {_overloadless(op) for op in blamed | ops}
        called = [change for change in changes if _overloadless(change[0]) in names]
        if not changes:
            return f"autocast's policy on {device} is the same in {both[0]} and {both[1]}", []
        tables = list(view.tables)
        if not called:
            number = counted(len(changes), "ops")
            whether = "none of which the target calls" if ops else "and which of them the target calls was not recorded"
            return f"autocast's policy on {device} differs in {number}, {whether}", tables
        return f"autocast's policy on {device} explains it: {listed([_line(*change) for change in called], 3)}", tables

    def done(self, number: int) -> None:
        """Remove its environment with `prune`."""
        if self.prune:
            self.environments.remove(self._release(number))

    def close(self) -> None:
        """Remove every environment of the package with `prune`."""
        for release in self.environments.kept() if self.prune else ():
            self.environments.remove(release)

    def missing(self) -> list[str]:
        """The releases without an environment."""
        there = {*self.environments.kept(), self.environments.installed()}
        return [number for number in map(self._release, range(len(self.known))) if number not in there]

    def estimate(self, looks: int) -> str:
        """Return what a search with so many looks needs, in words. Raises `UsageError` where the disk is too small."""
        size, seconds = self.environments.estimate()
        free, new = self.environments.free(), min(len(self.missing()), looks)
        text = f"{counted(len(self.known), 'releases')} of {self.environments.package}, at most {looks} to judge"
        if not new:
            return f"{text}; their environments are in {self.environments.folder}"
        each = f"about {size / 1e9:.1f} GB" + (f" and {seconds / 60:.0f} min" if seconds >= 60 else "")
        if size * (1 if self.prune else new) > free:
            raise UsageError(
                f"{text}: {new} environments of {each} each do not fit on the disk of {self.environments.folder}, "
                f"which has {free / 1e9:.1f} GB: --prune keeps one at a time, and XDG_CACHE_HOME may name another disk"
            )
        there = f"{free / 1e9:.0f} GB free in {self.environments.folder}"
        return f"{text}; {new} environments to make of {each} each, {there}"

    def _release(self, number: int) -> str:
        return self.known[number].key.partition("==")[2]


def _starts(number: Number, end: Number) -> bool:
    return number.release[: len(end.release)] == end.release


def _overloadless(op: str) -> str:
    return op.partition("::")[2].partition(".")[0].removesuffix("_")


def _line(op: str, *rules: object) -> str:
    before, after = ("left alone" if rule == NONE else rule for rule in rules)
    return f"{op} was {before}, and is {after}"
