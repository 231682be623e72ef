"""Which findings about a subject follow from another one: a training mistake is shown once, its effects beneath it.

A row of `_RULES` is a mechanism: the same line, the same tensors, values that pass on an infinity, calls of a
GradScaler after a mistake. It reads fields of findings, never their words. What no row connects stays on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from os.path import basename

from ampcheck.core.finding import PROBLEMS, SEVERITY, Finding, Verdict, Where, phase_order


def with_causes(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings in their order, each with the `cause` that it follows from, empty for a cause.

    A cause is about the same subject, at least as severe as what follows from it, and follows from nothing itself. In
    the same arm, unless it is a policy, which is one of a device. Verdicts do not change.
    """
    findings = tuple(replace(finding, cause=()) for finding in findings)
    by_name: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.verdict in PROBLEMS:
            by_name.setdefault(finding.name, []).append(finding)
    causes = {id(f): cause for group in by_name.values() for f, cause in _followers(group)}
    return tuple(replace(f, cause=causes[id(f)].key) if id(f) in causes else f for f in findings)


def _followers(problems: Sequence[Finding]) -> Iterator[tuple[Finding, Finding]]:
    """The findings that follow from another, each with its first cause."""
    ordered = sorted(problems, key=lambda finding: SEVERITY.index(finding.verdict))
    stopped = {f.subject for f in problems if f.check == "coverage" and f.where.op.startswith(_SCALER)}
    direct: dict[int, Finding] = {}
    for number, finding in enumerate(ordered):
        for other, cause in enumerate(ordered):
            severe = SEVERITY.index(cause.verdict) <= SEVERITY.index(finding.verdict)
            pair = _Pair(cause, finding, cause.where, finding.where, other < number, finding.subject in stopped)
            if other != number and severe and pair.explained:
                direct[id(finding)] = cause
                break
    for finding in ordered:
        first, seen = direct.get(id(finding)), {id(finding)}
        while first is not None and id(first) in direct and id(first) not in seen:
            seen.add(id(first))
            first = direct[id(first)]
        if first is not None and id(first) not in seen:
            yield finding, first


@dataclass(frozen=True, slots=True)
class _Pair:
    """A finding at `where`, and what may be its cause, `at` another place.

    earlier: the cause comes first. stopped: a call of a GradScaler ended the run.
    """

    cause: Finding
    finding: Finding
    at: Where
    where: Where
    earlier: bool
    stopped: bool

    @property
    def explained(self) -> bool:
        """True if a rule connects them."""
        if self.cause.subject != self.finding.subject and self.cause.check != "policy-banned":
            return False
        cause, finding = self.cause, self.finding
        return any(rule(self) for rule in _between(cause.check, cause.kind, finding.check, finding.kind))

    @property
    def same_line(self) -> bool:
        place = self.at.file, self.at.line
        return all(place) and place == (self.where.file, self.where.line)

    @property
    def same_step(self) -> bool:
        return self.at.step is not None and self.at.step == self.where.step

    @property
    def later_step(self) -> bool:
        return self.where.step is not None and self.where.step > (self.at.step or 0)

    @property
    def after(self) -> bool:
        """True if the finding is at or after the cause; of an unknown step only after the first step's."""
        if self.where.step is None or self.where.step != (self.at.step or 0):
            return self.later_step or not (self.where.step or self.at.step)
        return phase_order(self.where.phase or "update") >= phase_order(self.at.phase or "forward")

    @property
    def of_op(self) -> bool:
        """True if the cause is an op that fails, on the line of the finding unless that has none."""
        known = self.same_line or not self.where.file
        return known and self.cause.verdict is Verdict.FAIL and bool(self.at.op) and self.at.step is None

    @property
    def reached(self) -> bool:
        """True if the cause reaches a weight that the finding names, or its state; one that names none is reached."""
        names = [f"{name}." for name in self.cause.names]
        weights = tuple(f"{weight}." for weight in self.finding.names)
        return not weights or any(name.startswith(weights) for name in names)


@lru_cache(1024)
def _between(cause: str, cause_kind: str, finding: str, kind: str) -> tuple[Callable[[_Pair], bool], ...]:
    """The rules from one check to another."""
    causes, findings = {cause, f"{cause}/{cause_kind}"}, {finding, f"{finding}/{kind}"}
    return tuple(rule for one, other, rule in _RULES if causes & {*one.split()} and findings & {*other.split()})


def _has_limit(finding: Finding) -> bool:
    """Return whether `loss-dtype` is about a loss that is finite in float64 alone, and not about the dtype of a
    loss."""
    return finding.limit is not None and math.isfinite(finding.limit)


_SCALER, _NORM = "GradScaler.", "aten::linalg_vector_norm"
_DIGIT_CHECKS = "silent-zero flush precision-loss"
_INFINITE = "overflow silent-zero"
_ZERO = "stagnation/guard overflow silent-zero"

_RULES: tuple[tuple[str, str, Callable[[_Pair], bool]], ...] = (
    # The op that a policy bans raises, or is computed otherwise on another device.
    ("policy-banned", "low-precision-error policy-gap", lambda p: p.same_line),
    # Calls of a GradScaler. What a step returns is computed before its update; what is clipped or added up is scaled.
    ("scaler-protocol", "scale-invariance/", lambda p: p.after),
    ("scaler-protocol", "scale-invariance/returned", lambda p: p.later_step),
    ("scaler-protocol", "coverage", lambda p: p.where.op.startswith(_SCALER) and p.finding.verdict is Verdict.FAIL),
    ("scaler-protocol/half", "master-weights/half", lambda _: True),
    ("scaler-protocol", _DIGIT_CHECKS, lambda p: p.same_line),
    ("scaler-protocol", "overflow headroom", lambda p: p.stopped and p.where.phase == "backward"),
    ("scaler-protocol", "gradient-underflow loss-scale flush silent-zero",
     lambda p: p.at.phase == p.where.phase == "backward" and p.after),
    # A region around the loop holds backward and update, and keeps the casts of weights that the update changes.
    ("autocast-scope", "autocast-scope/region", lambda p: p.at.phase == "backward"),
    ("autocast-scope", "autocast-cache",
     lambda p: p.at.phase == "update" and basename(p.at.place) in map(basename, p.finding.names)),
    # An eps that is zero, and running values that stand still.
    ("stagnation/guard", "optimizer-state", lambda p: p.where.step is not None),
    ("stagnation/guard", f"overflow headroom stagnation/ {_DIGIT_CHECKS}", lambda p: p.same_line),
    ("stagnation/", "precision-loss", lambda p: p.same_line),
    ("stagnation/", "reduce-precision", lambda p: p.same_line and p.where.op != _NORM),
    ("stagnation/", "stagnation/", lambda p: p.same_line and p.earlier),
    ("resume", "resume", lambda p: p.same_line and p.earlier),
    # Of the gradients of one backward pass the first; the weights that it was applied to give the next losses.
    ("nonfinite-gradient", "nonfinite-gradient", lambda p: p.same_step and p.earlier),
    ("nonfinite-gradient", "overflow", lambda p: p.at.step is not None and p.later_step and not p.where.op),
    # An output becomes infinite at an op that loses values and gives no infinity.
    (_DIGIT_CHECKS, "overflow/output", lambda p: p.at == p.where),
    # A loss that is not finite, and the gradients of it.
    ("overflow nonfinite-reference", "loss-dtype", lambda p: p.same_step and _has_limit(p.finding)),
    ("overflow nonfinite-reference", "nonfinite-gradient loss-scale",
     lambda p: p.at.step is not None and p.after and not p.where.file),
    # What is computed on the line of an infinity, and what backward keeps of it.
    (_INFINITE, "headroom", lambda p: p.of_op and p.same_line),
    (_INFINITE, "stagnation", lambda p: p.of_op and p.same_line and p.at.op == p.where.op),
    (_INFINITE, "reduce-precision", lambda p: p.of_op and p.same_line and p.where.op != _NORM),
    (_INFINITE, "silent-zero flush",
     lambda p: p.of_op and p.same_line and p.after and (p.at.phase, p.where.phase) == ("forward", "backward")),
    # An infinity or NaN arrives.
    (_ZERO, "coverage", lambda p: p.of_op and p.where.op.startswith(_SCALER) and p.finding.verdict is Verdict.WARN),
    (_ZERO, "nonfinite-gradient", lambda p: p.of_op and p.reached),
    (_ZERO, "loss-dtype", lambda p: p.of_op and _has_limit(p.finding)),
    (_ZERO, "overflow loss-scale", lambda p: p.of_op and p.where.step is not None and not p.where.module),
)  # fmt: skip
"""A cause, what follows from it, and when. `overflow` is of any kind, `overflow/` of none, `overflow/output` of one."""
