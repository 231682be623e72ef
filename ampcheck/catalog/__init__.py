"""The registry of checks: `REGISTRY` holds every check by its name, with the text of `ampcheck explain SLUG`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ampcheck.catalog import autocast, compiled, numerics, outcome, search, speed, training
from ampcheck.core.check import Check
from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Kind
from ampcheck.core.text import did_you_mean

__all__ = ["REGISTRY", "VERDICTS", "explain", "for_kind"]

_MODULES = (numerics, autocast, compiled, training, search, speed, outcome)

REGISTRY: Mapping[str, Check] = MappingProxyType(
    {check.slug: check for module in _MODULES for check in vars(module).values() if isinstance(check, Check)}
)


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


def for_kind(kind: Kind) -> tuple[str, ...]:
    """The names of the checks by which `audit` judges a subject of this kind."""
    return tuple(check.slug for check in REGISTRY.values() if kind in check.subjects)


def explain(slug: str) -> Check:
    """The check with this name. Raises `UsageError` naming the nearest check or verdict for an unknown one."""
    if slug not in REGISTRY:
        meant = did_you_mean(slug, [*REGISTRY, *VERDICTS]) or f"there are {', '.join(REGISTRY)}"
        raise UsageError(f"there is no check {slug!r}: {meant}")
    return REGISTRY[slug]
