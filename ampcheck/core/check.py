"""A check: its name, its page of help, and the one builder of its findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, TypedDict

from ampcheck.core.arm import Arm, ArmedName
from ampcheck.core.finding import PROBLEMS, UNJUDGED, Finding, Verdict, Where
from ampcheck.core.source import code_at
from ampcheck.core.subject import Kind

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NOWHERE = Where()

LISTED = 5
"""Findings of one check that a run reports before it only counts them."""


class Evidence(TypedDict, total=False):
    """Fields of a finding besides its message. `observed` and `limit` are in `unit`, by default that of the check."""

    where: Where
    observed: float | None
    limit: float | None
    unit: str
    hint: str
    kind: str
    names: Iterable[str]


SECTIONS = ("Requires", "Measured", "Causes", "Fix")
"""The paragraphs of a page, each of which begins with its name and a colon."""


@cache
def sections(page: str) -> Mapping[str, str]:
    """The paragraphs of a page by their names, each on one line."""
    paragraphs = re.split(rf"^({'|'.join(SECTIONS)}):\s", page, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(paragraphs[1::2], paragraphs[2::2], strict=True)}


@dataclass(frozen=True, slots=True)
class Check:
    """A check is declared once, in a file of its own; every finding of it is built here.

    slug: the name in findings, options and markers. page: of `ampcheck explain`, the docstring of that file, which has
    the `SECTIONS`. unit: of `observed` and `limit` where a finding gives none. subjects: kinds of subjects that `audit`
    judges by it. needs: class names of the records that its function judges. order: checks of one record are judged,
    and all are listed, from the lowest to the highest, equals by name. evidence: cases of the ledger that need it.
    A subject that `armed` made gives a finding its arm.
    """

    slug: str
    family: str
    page: str = field(repr=False)
    unit: str = ""
    subjects: tuple[Kind, ...] = ()
    needs: tuple[str, ...] = ()
    order: int = 1000
    evidence: tuple[str, ...] = ()

    @property
    def requires(self) -> str:
        """The paragraph *Requires* of the page."""
        return self._section("Requires")

    @property
    def measured(self) -> str:
        """The paragraph *Measured* of the page."""
        return self._section("Measured")

    @property
    def causes(self) -> str:
        """The paragraph *Causes* of the page."""
        return self._section("Causes")

    @property
    def fix(self) -> str:
        """The paragraph *Fix* of the page."""
        return self._section("Fix")

    def _section(self, name: str) -> str:
        return sections(self.page or "").get(name, "")  # `python -OO` drops docstrings

    def __str__(self) -> str:
        return self.slug

    def finding(self, verdict: Verdict, subject: str, message: str, **evidence: Unpack[Evidence]) -> Finding:
        """A finding whose verdict is computed. Raises `ValueError` for a pass, which `passed` builds."""
        if verdict is Verdict.PASS:
            raise ValueError("a pass needs a count of observations: use Check.passed")
        return self._build(verdict, subject, message, None, **evidence)

    def fail(self, subject: str, message: str, **evidence: Unpack[Evidence]) -> Finding:
        """The requirement is violated."""
        return self._build(Verdict.FAIL, subject, message, None, **evidence)

    def warn(self, subject: str, message: str, **evidence: Unpack[Evidence]) -> Finding:
        """A risk that did not cause a failure with these inputs."""
        return self._build(Verdict.WARN, subject, message, None, **evidence)

    def undecided(self, subject: str, message: str, **evidence: Unpack[Evidence]) -> Finding:
        """The measurement does not decide."""
        return self._build(Verdict.UNDECIDED, subject, message, None, **evidence)

    def incomplete(self, subject: str, message: str, **evidence: Unpack[Evidence]) -> Finding:
        """The subject prevents the check."""
        return self._build(Verdict.INCOMPLETE, subject, message, None, **evidence)

    def unjudged(self, subject: str, message: str, *, hint: str = "") -> Finding:
        """Nothing of what was asked for was judged: a whole subject, or a check that was selected."""
        return self.incomplete(subject, message, hint=hint, observed=0, limit=1, unit=UNJUDGED)

    def skip(self, subject: str, reason: str, **evidence: Unpack[Evidence]) -> Finding:
        """The check does not apply to the subject, or this machine lacks what it needs."""
        return self._build(Verdict.SKIP, subject, reason, None, **evidence)

    def absent(self, subject: str, reason: str, **evidence: Unpack[Evidence]) -> Finding:
        """The subject does nothing that the check judges."""
        return self._build(Verdict.SKIP, subject, reason, 0, **evidence)

    def passed(self, subject: str, message: str, seen: int, **evidence: Unpack[Evidence]) -> Finding:
        """A pass that rests on `seen` observations; a skip where there were none."""
        if seen < 1:
            return self.absent(subject, f"nothing to judge: {message}", hint=evidence.get("hint", ""))
        return self._build(Verdict.PASS, subject, message, seen, **evidence)

    def judged(self, verdict: Verdict, subject: str, message: str, seen: int, **evidence: Unpack[Evidence]) -> Finding:
        """A finding whose verdict is computed and may be a pass, which drops the hint."""
        if verdict is not Verdict.PASS:
            return self.finding(verdict, subject, message, **evidence)
        evidence["hint"] = ""
        return self.passed(subject, message, seen, **evidence)

    def _build(
        self, verdict: Verdict, subject: str, message: str, seen: int | None, **evidence: Unpack[Evidence]
    ) -> Finding:
        where, hint = evidence.get("where", _NOWHERE), evidence.get("hint", "")
        observed, limit = evidence.get("observed"), evidence.get("limit")
        observed, limit = None if observed is None else float(observed), None if limit is None else float(limit)
        unit = "" if observed is None and limit is None else evidence.get("unit", self.unit)
        code = code_at(where) if verdict in PROBLEMS else ""
        measured = observed, limit, unit
        return Finding(
            *(self.slug, verdict, str(subject), message, where, *measured, hint, seen),
            family=self.family,
            code=code,
            arm=subject.arm if isinstance(subject, ArmedName) else Arm(),
            kind=evidence.get("kind", ""),
            names=tuple(evidence.get("names", ())),
        )


def first_findings(findings: Sequence[Finding], limit: int = LISTED) -> list[Finding]:
    """The first `limit` findings, failures before warnings; the message of the last counts those left out."""
    ordered = sorted(findings, key=lambda finding: finding.verdict is not Verdict.FAIL)
    if len(ordered) <= limit:
        return ordered
    *shown, last = ordered[:limit]
    return [*shown, replace(last, message=f"{last.message}; {len(ordered) - limit} further places are left out")]
