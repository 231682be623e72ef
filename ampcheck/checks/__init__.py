"""The registry of checks: one file for each, and those that other packages add as entry points `ampcheck.checks`.

A file has a docstring, the page of `ampcheck explain`; `CHECK`, the declaration; and where a record is to be judged
`check(record, limits)`, a pure function without torch that yields findings. What a family shares is in its package.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeAlias

from ampcheck.core.check import SECTIONS, Check
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.extensions import Extension, extensions
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import Kind
from ampcheck.core.text import did_you_mean

GROUP = "ampcheck.checks"
"""The entry points of other packages; each is an object, such as a module, with `CHECK` and `check`."""

Judge: TypeAlias = Callable[[Any, Limits], "Iterator[Finding]"]

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
    """A check with its function, None where no record of its own is judged. package: that adds it, "" for ampcheck."""

    check: Check
    judge: Judge | None
    package: str = ""

    def findings(self, record: Any, limits: Limits) -> Iterator[Finding]:
        """What the check says of a record. The check of another package is incomplete where its function raises."""
        if self.judge is None or not self.package:
            yield from self.judge(record, limits) if self.judge is not None else ()
            return
        try:
            said = list(self.judge(record, limits))
            if strange := [f for f in said if not isinstance(f, Finding) or f.check != self.check.slug]:
                raise TypeError(f"it must yield findings of {self.check}; it yielded {strange[0]!r:.60}")
        except Exception as error:  # noqa: BLE001  # the other checks go on
            subject = getattr(record, "name", "") or record.subject
            said = [self.check.incomplete(subject, f"not judged: its function in {self.package} raised {brief(error)}")]
        yield from said


@cache
def registered() -> Mapping[str, Registered]:
    """Every check by its name, in the declared order; equals by name."""
    others = [Registered(one.value[0], one.value[1], one.package) for one in extended() if one.value is not None]
    checks = [*_own(), *others]
    return MappingProxyType({r.check.slug: r for r in sorted(checks, key=lambda r: (r.check.order, r.check.slug))})


@cache
def _own() -> tuple[Registered, ...]:
    """The checks of the files of this package."""
    families = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__) if module.ispkg]
    names = [f"{family.__name__}.{m.name}" for family in families for m in pkgutil.iter_modules(family.__path__)]
    found = [Registered(module.CHECK, getattr(module, "check", None)) for module in map(import_module, names)]
    return (*found, *_without_files())


def _without_files() -> Iterator[Registered]:
    """The checks that are declared in `ampcheck.catalog`."""
    from ampcheck.catalog import autocast, compiled, numerics, outcome, speed, training

    modules = {numerics: 100, autocast: 300, compiled: 500, training: 600, speed: 800, outcome: 900}
    for module, order in modules.items():
        declared = [check for check in vars(module).values() if isinstance(check, Check)]
        for number, check in enumerate(declared):
            yield Registered(replace(check, order=order + number), None)


def extended() -> tuple[Extension, ...]:
    """The checks of other packages, each with its declaration and function as value, and those that are broken."""
    return extensions(GROUP, _accepted)


def _accepted(added: Any) -> tuple[Check, Judge]:
    """The declaration and the function of an entry point. Raises `UsageError` for one that cannot be registered."""
    check, judge = added.CHECK, added.check
    if not isinstance(check, Check) or not callable(judge):
        raise UsageError(f"CHECK must be an ampcheck Check, and check a function; found {check!r:.60}")
    if taken := [own for own in _own() if own.check.slug == check.slug]:
        raise UsageError(f"the name {taken[0].check} is one of ampcheck's own checks")
    if missing := [name for name in SECTIONS if not getattr(check, _FIELDS[name])]:
        raise UsageError(f"the docstring needs paragraphs that begin with {', '.join(f'{name}:' for name in missing)}")
    return check, judge


_FIELDS = dict(zip(SECTIONS, ("requires", "measured", "causes", "fix"), strict=True))


def findings(record: Any, limits: Limits, checks: Collection[str] | None = None) -> list[Finding]:
    """What the checks say that need this record, or the named ones among them."""
    needed = type(record).__name__
    return [
        finding
        for slug, one in registered().items()
        if needed in one.check.needs and (checks is None or slug in checks)
        for finding in one.findings(record, limits)
    ]


def added(*kinds: Kind) -> tuple[str, ...]:
    """The names of the checks of other packages that judge subjects of one of these kinds."""
    return tuple(slug for slug, one in registered().items() if one.package and set(kinds) & set(one.check.subjects))


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
    return tuple(check.slug for check in REGISTRY.values() if kind in check.subjects)


def explain(slug: str) -> Check:
    """The check with this name. Raises `UsageError` naming the nearest check or verdict for an unknown one."""
    if slug not in REGISTRY:
        meant = did_you_mean(slug, [*REGISTRY, *VERDICTS]) or f"there are {', '.join(REGISTRY)}"
        raise UsageError(f"there is no check {slug!r}: {meant}")
    return REGISTRY[slug]
