"""Which findings about a subject follow from another one: a training mistake is shown once, its effects beneath it.

Each rule is a mechanism: the same line and tensors, values that pass on an infinity, calls of a GradScaler that come
after a mistake. Findings that no rule connects stay findings of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os.path import basename

from ampcheck.core.run import PROBLEMS, SEVERITY, Finding, Verdict, Where, phase_order

GUARD_VANISHED = "a constant that guards must not vanish"
"""How `stagnation` begins where an eps is zero in the format: what is divided by it becomes infinite."""

SAME_REGION = "in the region of a backward pass"
"""How `autocast-scope` says that backward passes and optimizer steps run inside the same region."""

LOST_OUTPUT = "outputs must be finite where float64's are"
"""How `overflow` begins about an output that became infinite at an op that loses values without an infinity."""

RETURNED = "what the step returns"
"""How `scale-invariance` calls the value of a step, as distinct from a gradient."""

_LOSSES = ("silent-zero", "flush", "precision-loss")
"""Checks of values that an op loses and that remain finite."""

_NORM = "aten::linalg_vector_norm"


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
    return tuple(
        replace(f, cause=causes[id(f)].key if id(f) in causes else ()) if f.verdict in PROBLEMS else f for f in findings
    )


def _followers(problems: Sequence[Finding]) -> Iterable[tuple[Finding, Finding]]:
    """The findings that follow from another, each with its first cause."""
    ordered = sorted(problems, key=lambda finding: SEVERITY.index(finding.verdict))
    stopped = {finding.subject for finding in problems if finding.check == "coverage" and _in_scaler(finding)}
    direct: dict[int, Finding] = {}
    for number, finding in enumerate(ordered):
        for other, candidate in enumerate(ordered):
            severe = SEVERITY.index(candidate.verdict) <= SEVERITY.index(finding.verdict)
            if other == number or not severe:
                continue
            ended = finding.subject in stopped
            if _bans(candidate, finding) or _explains(candidate, finding, earlier=other < number, stopped=ended):
                direct[id(finding)] = candidate
                break
    for finding in ordered:
        cause, seen = direct.get(id(finding)), {id(finding)}
        while cause is not None and id(cause) in direct and id(cause) not in seen:
            seen.add(id(cause))
            cause = direct[id(cause)]
        if cause is not None and id(cause) not in seen:
            yield finding, cause


def _explains(cause: Finding, finding: Finding, *, earlier: bool, stopped: bool) -> bool:
    """Whether `finding` follows from `cause`. earlier: it comes first. stopped: a call of a scaler ended the run."""
    if cause.subject != finding.subject:
        return False
    if cause.check == "scaler-protocol":
        return _misused_scaler(cause, finding, stopped)
    if cause.check == "autocast-scope":
        return _misused_region(cause, finding)
    if _is_guard(cause):
        return _divided_by_zero(cause, finding)
    if cause.check == finding.check and finding.check in ("stagnation", "resume"):
        return earlier and _same_line(cause, finding) and not _is_guard(finding)
    if cause.check == "stagnation":  # a running value that stands still
        sums = finding.check == "reduce-precision" and finding.where.op != _NORM
        return (sums or finding.check == "precision-loss") and _same_line(cause, finding)
    if cause.check == "nonfinite-gradient":
        return _nonfinite_gradient(cause, finding, earlier)
    if cause.check in _LOSSES and finding.message.startswith(LOST_OUTPUT):
        return finding.check == "overflow" and cause.where == finding.where
    if cause.check == "nonfinite-reference" and cause.where.step is None:
        return False
    return cause.check in ("overflow", "silent-zero", "nonfinite-reference") and _became_infinite(cause, finding)


def _nonfinite_gradient(cause: Finding, finding: Finding, earlier: bool) -> bool:
    """Of the gradients of one backward pass the first; the weights that it was applied to give the next losses."""
    step = cause.where.step
    if cause.check == finding.check:
        return earlier and step is not None and step == finding.where.step
    returned = finding.check == "overflow" and not finding.where.op and finding.where.step is not None
    return returned and step is not None and _after(cause.where, finding.where, strictly=True)


def _bans(cause: Finding, finding: Finding) -> bool:
    """Whether a policy bans the op that raises at a line, or that another device computes otherwise."""
    effects = ("low-precision-error", "policy-gap")
    return cause.check == "policy-banned" and finding.check in effects and _same_line(cause, finding)


def _misused_scaler(cause: Finding, finding: Finding, stopped: bool) -> bool:
    check, where = finding.check, finding.where
    if check == "scale-invariance":  # what a step returns is computed before its update
        returned = RETURNED in finding.message
        return "autograd.grad" not in finding.hint and _after(cause.where, where, strictly=returned)
    if check == "coverage":
        return _in_scaler(finding) and finding.verdict is Verdict.FAIL
    if check == "master-weights":
        return all("float32 parameters" in text for text in (cause.message, finding.message))
    if check in _LOSSES and _same_line(cause, finding):  # what is clipped or added up is scaled there
        return True
    if where.phase != "backward":
        return False
    if check in ("overflow", "headroom"):  # the scaler would have skipped the step and backed off
        return stopped
    unscaled = cause.where.phase == "backward" and _after(cause.where, where)
    return unscaled and check in ("gradient-underflow", "loss-scale", "flush", "silent-zero")


def _misused_region(cause: Finding, finding: Finding) -> bool:
    """A region around the loop holds backward and update, and keeps the casts of weights that the update changes."""
    if finding.check == "autocast-scope":
        return cause.where.phase == "backward" and SAME_REGION in finding.message
    place = rf"(?<![\w.-]){re.escape(basename(cause.where.file))}:{cause.where.line}(?!\d)"
    cached = finding.check == "autocast-cache" and cause.where.phase == "update"
    return cached and re.search(place, finding.message) is not None


def _divided_by_zero(cause: Finding, finding: Finding) -> bool:
    """Values vanish and become infinite on the line whose eps is zero; what has no line of its own passes it on."""
    if finding.check == "optimizer-state":
        return finding.where.step is not None
    values = ("overflow", "silent-zero", "flush", "precision-loss", "stagnation", "headroom")
    return (finding.check in values and not _is_guard(finding) and _same_line(cause, finding)) or _infinite(
        cause, finding
    )


def _became_infinite(cause: Finding, finding: Finding) -> bool:
    if cause.where.step is not None:  # a loss that is not finite, and the gradients of it
        gradients = finding.check in ("nonfinite-gradient", "loss-scale") and not finding.where.file
        result = finding.check == "loss-dtype" and _is_result(finding, cause.where)
        return cause.check != "silent-zero" and (result or (gradients and _after(cause.where, finding.where)))
    if cause.verdict is not Verdict.FAIL or not cause.where.op:
        return False
    if not _same_line(cause, finding):
        return _infinite(cause, finding)
    same_op = finding.check == "stagnation" and finding.where.op == cause.where.op
    sums = finding.check == "reduce-precision" and finding.where.op != _NORM
    saved = finding.check in ("silent-zero", "flush") and _after(cause.where, finding.where)
    kept = saved and (cause.where.phase, finding.where.phase) == ("forward", "backward")
    return same_op or sums or kept or finding.check == "headroom" or _infinite(cause, finding)


def _infinite(cause: Finding, finding: Finding) -> bool:
    """Whether a finding says that an infinity or NaN arrived, on the line of the cause or at no line."""
    where = finding.where
    if where.file and not _same_line(cause, finding):
        return False
    if finding.check == "coverage":
        return finding.verdict is Verdict.WARN and _in_scaler(finding)
    if finding.check == "nonfinite-gradient":
        return _names_tensors_of(cause, finding)
    if finding.check == "loss-dtype":
        return _is_result(finding, where)
    return finding.check in ("overflow", "loss-scale") and where.step is not None and not where.module


def _names_tensors_of(cause: Finding, finding: Finding) -> bool:
    """Whether a cause names a weight that the finding names: a value that no weight was made of explains none.

    The cause names the state of those weights (an eps), or the places that its damage reaches.
    """
    listed = finding.message.partition("; ")[2].partition(" have infinite")
    names = [name for name in listed[0].partition(" and ")[0].split(", ") if listed[1]]
    named = [re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", cause.message) is not None for name in names]
    return not names or (all(named) if _is_guard(cause) and " more " not in cause.message else any(named))


def _is_result(finding: Finding, where: Where) -> bool:
    """Whether `loss-dtype` is about a loss that is not finite in that step, and not about the dtype of a loss."""
    return math.isfinite(finding.limit or math.nan) and finding.where.step == where.step


def _is_guard(finding: Finding) -> bool:
    return finding.check == "stagnation" and finding.message.startswith(GUARD_VANISHED)


def _in_scaler(finding: Finding) -> bool:
    return finding.where.op.startswith("GradScaler.")


def _same_line(cause: Finding, finding: Finding) -> bool:
    place = cause.where.file, cause.where.line
    return all(place) and place == (finding.where.file, finding.where.line)


def _after(cause: Where, where: Where, *, strictly: bool = False) -> bool:
    """Whether a place comes at or after the cause; one of an unknown step only after the first step's."""
    first = cause.step or 0
    if where.step is None:
        return first == 0 and not strictly
    if strictly or where.step != first:
        return where.step > first
    return phase_order(where.phase or "update") >= phase_order(cause.phase or "forward")
