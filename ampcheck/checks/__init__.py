"""The registry of checks: one file for each, and those that other packages add as entry points `ampcheck.checks`.

A file has a docstring, the page of `ampcheck explain`; `CHECK`, the declaration; and where a record is to be judged
`check(record, limits)`, a pure function without torch that yields findings. What a family shares is in its package,
or in a file whose name begins with `_`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from ampcheck.core.check import SECTIONS, Check, sections
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.extensions import Extension, extensions
from ampcheck.core.run import Finding
from ampcheck.core.subject import Kind
from ampcheck.core.text import did_you_mean

GROUP = "ampcheck.checks"
"""The entry points of other packages; each is an object, such as a module, with `CHECK` and `check`."""

VERDICTS: Mapping[str, str] = MappingProxyType(
    {
        "fail": "The run shows the damage. The only verdict that fails a build (exit code 1, AssertionError).",
        "warn": "A risk that did not cause a failure with these inputs.",
        "undecided": "The interval of a measurement includes the limit; more time narrows it.",
        "incomplete": "The subject prevents a requested check: its backward raises in every precision, it returns no "
        "floating tensor, no module that ran gets a gradient, its optimizer never steps. Nothing failed, and nothing "
        "was judged; the finding says what to change.",
        "accepted": "A failure or warning that the repository accepts, in its baseline or in a comment on the line.",
        "skip": "The check does not apply to the subject, or this machine lacks what it needs. The reason is given.",
        "pass": "The requirement is met. Every pass counts its observations; without any it is a skip.",
    }
)


@dataclass(frozen=True, slots=True)
class Registered:
    """A check. source: what has its `CHECK` and, if it judges a record, `check`. package: that adds it, "" for
    ampcheck."""

    check: Check
    source: Any
    package: str = ""

    def findings(self, record: Any, limits: Any) -> list[Finding]:
        """Return what the check says of a record. The check of another package is incomplete where its function
        raises."""
        if not self.package:
            return list(self.source.check(record, limits))
        try:
            said = list(self.source.check(record, limits))
            if strange := [f for f in said if not isinstance(f, Finding) or f.check != self.check.slug]:
                raise TypeError(f"it must yield findings of {self.check}; it yielded {strange[0]!r:.60}")
        except Exception as error:  # noqa: BLE001  # the other checks go on
            subject = getattr(record, "name", "") or record.subject
            said = [self.check.incomplete(subject, f"not judged: its function in {self.package} raised {brief(error)}")]
        return said


@cache
def registered() -> Mapping[str, Registered]:
    """Every check by its name, in the declared order; equals by name."""
    others = [Registered(one.value.CHECK, one.value, one.package) for one in extended() if one.value is not None]
    checks = sorted((*_own(), *others), key=attrgetter("check.order", "check.slug"))
    return MappingProxyType({one.check.slug: one for one in checks})


@cache
def _own() -> tuple[Registered, ...]:
    """The checks of the files of this package."""
    families = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__) if module.ispkg]
    names = [
        f"{family.__name__}.{m.name}"
        for family in families
        for m in pkgutil.iter_modules(family.__path__)
        if m.name[0] != "_"
    ]
    return tuple(Registered(module.CHECK, module) for module in map(import_module, names))


def needing(record: str) -> tuple[str, ...]:
    """The names of ampcheck's own checks that judge a record, in their order."""
    own = sorted(_own(), key=attrgetter("check.order"))
    return tuple(one.check.slug for one in own if record in one.check.needs)


def extended() -> tuple[Extension, ...]:
    """The checks of other packages, each with the object that has them as value, and those that are broken."""
    return extensions(GROUP, _accepted)


def _accepted(added: Any) -> Any:
    """The object of an entry point. Raises `UsageError` for one that cannot be registered."""
    check = added.CHECK
    if not isinstance(check, Check) or not callable(added.check):
        raise UsageError(f"CHECK must be an ampcheck Check, and check a function; found {check!r:.60}")
    if check.slug in {own.check.slug for own in _own()}:
        raise UsageError(f"the name {check} is one of ampcheck's own checks")
    if not check.needs:
        raise UsageError(f"{check} must name the records that it needs: without one it is never called")
    records = {name for own in _own() for name in own.check.needs}
    if unknown := [name for name in check.needs if name not in records]:
        meant = did_you_mean(unknown[0], records) or f"there are {', '.join(sorted(records))}"
        raise UsageError(f"{check} needs {unknown[0]}, which is no record of ampcheck: {meant}")
    if missing := [f"{name}:" for name in SECTIONS if not sections(check.page or "").get(name)]:
        raise UsageError(f"the docstring needs paragraphs that begin with {', '.join(missing)}")
    return added


def findings(record: Any, limits: Any, checks: Collection[str] | None = None) -> list[Finding]:
    """Return what the checks say that need this record, or the named ones among them. limits: `Limits`, or those of
    graphs."""
    needed = type(record).__name__
    return [
        finding
        for slug, one in registered().items()
        if needed in one.check.needs and (checks is None or slug in checks)
        for finding in one.findings(record, limits)
    ]


def added(*kinds: Kind) -> tuple[str, ...]:
    """The names of the checks of other packages that judge subjects of one of these kinds."""
    wanted = set(kinds)
    return tuple([slug for slug, one in registered().items() if one.package and wanted & set(one.check.subjects)])


class _Registry(Mapping[str, Check]):
    """The checks by their names, which are found when they are first asked for."""

    def __getitem__(self, slug: str) -> Check:
        return registered()[slug].check

    def __iter__(self) -> Iterator[str]:
        return iter(registered())

    def __len__(self) -> int:
        return len(registered())


REGISTRY: Mapping[str, Check] = _Registry()


def for_kind(kind: Kind) -> tuple[str, ...]:
    """The names of the checks by which `audit` judges a subject of this kind."""
    return tuple([slug for slug, one in registered().items() if kind in one.check.subjects])


def explain(slug: str) -> Check:
    """The check with this name. Raises `UsageError` naming the nearest check or verdict for an unknown one."""
    if slug not in REGISTRY:
        meant = did_you_mean(slug, [*REGISTRY, *VERDICTS]) or f"there are {', '.join(REGISTRY)}"
        raise UsageError(f"there is no check {slug!r}: {meant}")
    return REGISTRY[slug]
