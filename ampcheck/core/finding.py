"""Findings: one verdict of one check about one subject, and where and how it ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

from ampcheck.core.arm import Arm as Arm
from ampcheck.core.excerpt import Excerpt

Scalar: TypeAlias = str | int | float | bool | None


class Verdict(str, Enum):
    """Conclusion of a check. Only `FAIL` fails a build.

    `INCOMPLETE`: the subject prevents a requested check, such as a backward that raises in every precision.
    `ACCEPTED`: the repository accepts the failure or warning, in its baseline or in a comment on the line.
    `SKIP`: the check does not apply to the subject, or this machine lacks what it needs.
    """

    PASS = "pass"
    FAIL = "fail"
    WARN = "warn"
    UNDECIDED = "undecided"
    INCOMPLETE = "incomplete"
    ACCEPTED = "accepted"
    SKIP = "skip"

    def __str__(self) -> str:
        return self.value


SEVERITY: tuple[Verdict, ...] = (
    Verdict.FAIL,
    Verdict.WARN,
    Verdict.UNDECIDED,
    Verdict.INCOMPLETE,
    Verdict.ACCEPTED,
    Verdict.SKIP,
    Verdict.PASS,
)
"""Verdicts, worst first."""

FAIL_ON: Mapping[str, tuple[Verdict, ...]] = MappingProxyType(
    {
        "fail": (Verdict.FAIL,),
        "warn": (Verdict.FAIL, Verdict.WARN),
        "incomplete": (Verdict.FAIL, Verdict.WARN, Verdict.UNDECIDED, Verdict.INCOMPLETE),
        "never": (),
    }
)
"""The verdicts that fail, by the mildest of them, as `fail-on` names it."""

UNJUDGED = "verdicts"
"""The unit of a finding about what was asked for and not judged: there is none, where one is required."""

PROBLEMS = (Verdict.FAIL, Verdict.WARN)
"""Verdicts of a finding that shows damage or a risk."""


@dataclass(frozen=True, slots=True)
class Where:
    """The location of a finding; unknown parts are empty.

    `phase` is forward, backward, update, compile or speed; `module` the dotted path inside the subject (the root is
    `""`); `op` an op overload such as `aten::mm`; `file` and `line` the user's source; `step` counts from 0.
    """

    phase: str = ""
    module: str = ""
    op: str = ""
    file: str = ""
    line: int | None = None
    step: int | None = None

    @property
    def part(self) -> str:
        """A note to the source line: an op of a backward pass has the line of its forward op, or of the hook that runs.
        Empty for other ops."""
        return "in the backward pass" if self.phase == "backward" and self.op else ""

    @property
    def place(self) -> str:
        """`model.py:12`; empty where the source is not known."""
        return f"{self.file}:{self.line}" if self.file and self.line is not None else self.file

    def __str__(self) -> str:
        parts = [self.phase, self.module, self.op, self.place]
        if self.step is not None:
            parts.append(f"step {self.step}")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict of one check about one subject; `family` groups checks, such as range, training and speed.

    `observed` and `limit` are in `unit`. `message` states the requirement, what was observed and where; `hint` names
    the knob to turn. `seen` counts the observations (ops, tensors, steps) that the verdict rests on; None where they
    were not counted. `cause` is the `key` of the finding that this one follows from, empty for one of its own.
    `code` is the source line at `where`, empty where it is not known; `excerpt` the lines around it. `accepted` is why
    the repository accepts the finding, and where it says so. `reproduce` is the command that finds this one again.
    `subject` ends with the `arm` in brackets, unless it is empty: `model [float16, eager]`. `kind` tells the mistakes
    of one check apart where causes depend on it (`ampcheck.checks.causes`); `names` are the tensors, and the lines
    such as `model.py:12`, that the finding is about besides `where`.
    """

    check: str
    verdict: Verdict
    subject: str
    message: str
    where: Where = Where()
    observed: float | None = None
    limit: float | None = None
    unit: str = ""
    hint: str = ""
    seen: int | None = None
    cause: tuple[Scalar, ...] = ()
    family: str = ""
    code: str = ""
    accepted: str = ""
    excerpt: Excerpt = field(default_factory=Excerpt)
    reproduce: str = ""
    arm: Arm = field(default_factory=Arm)
    kind: str = ""
    names: tuple[str, ...] = ()

    @property
    def unjudged(self) -> bool:
        """True if it is about what was asked for and not judged: a whole subject, or a check that was selected."""
        return self.verdict is Verdict.INCOMPLETE and self.unit == UNJUDGED

    @property
    def key(self) -> tuple[Scalar, ...]:
        """Equal for findings that differ in their numbers, wording or step alone, such as those of several ranks."""
        where = self.where
        return self.check, self.verdict.value, self.subject, where.phase, where.module, where.op, where.file, where.line

    @property
    def name(self) -> str:
        """The subject without its arm: `model` of `model [float16, eager]`."""
        return self.subject.removesuffix(f" [{self.arm}]") if self.subject.endswith("]") else self.subject


_PHASES = ("forward", "backward", "update")


def phase_order(phase: str) -> int:
    """The place of a phase in a step; phases of no step come last."""
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


_DIGITS = frozenset(("precision-loss", "stagnation", "flush", "silent-zero", "property-accuracy"))
"""Checks of finite results that have lost digits."""


def nearest_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, worst first; of one verdict those of infinities, NaN and exceptions before those of lost digits,
    then those that name a line of the user's code before others, and in the order in which code runs: forward,
    backward, update."""

    def order(finding: Finding) -> tuple[int, bool, bool, int]:
        where = finding.where
        return SEVERITY.index(finding.verdict), finding.check in _DIGITS, not where.file, phase_order(where.phase)

    return sorted(findings, key=order)
