"""Verdicts on the numbers of a cell, by the checks of an audit: a fast cell with wrong numbers is no win.

A cell in eager mode is compared with float64 by `precision-loss` and other checks of low precision; digits that the
model loses in float32 already are a warning. A compiled cell is compared with eager mode and float64 as well
(`compiled-error` and others).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from ampcheck.compiled.accuracy.checks import check_accuracy
from ampcheck.compiled.accuracy.judge import measure_accuracy
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.limits import Limits
from ampcheck.core.run import SEVERITY, Finding, Verdict
from ampcheck.core.settings import load_settings
from ampcheck.core.subject import Subject
from ampcheck.numerics import NumericsStats, check_numerics, measure_numerics
from ampcheck.speed.steps import EAGER, PRECISIONS, Optimizer, tf32

VALUES = ("precision-loss", "overflow", "nonfinite-gradient", "silent-zero", "flush", "low-precision-error")
COMPILED = ("compiled-error", "compiled-gradient", "compiled-dtype", "compiled-exception")

_ORDER = (*(verdict for verdict in SEVERITY if verdict is not Verdict.SKIP), Verdict.SKIP)


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on one cell. error: the largest relative error of an output against float64."""

    verdict: Verdict
    why: str
    error: float | None = None

    def __add__(self, other: Judged) -> Judged:
        """The worse of two, where a skip is worse than a pass, with the error of the second."""
        worse = min(other, self, key=lambda judged: SEVERITY.index(judged.verdict))
        return Judged(worse.verdict, worse.why, other.error)


@dataclass(slots=True)
class Judge:
    """Judges the cells of one subject, which share the reference and the eager runs.

    trains: whether gradients are judged. optimizer: of a training step, whose updates are judged. scaled: whether the
    loss is scaled, without which float16 loses small gradients. Compiled cells reset Dynamo.
    """

    subject: Subject
    device: str = "cpu"
    trains: bool = False
    optimizer: Optimizer | None = None
    scaled: bool = False
    _eager: dict[str, Judged] = field(default_factory=dict)

    def of(self, mode: str, precision: str) -> Judged:
        """The verdict on a cell; one that cannot be judged is skipped with the reason."""
        try:
            with tf32(precision, torch.device(self.device).type)():
                if precision not in self._eager:
                    self._eager[precision] = self._judge_eager(precision)
                eager = self._eager[precision]
                return eager if mode == EAGER else eager + self._judge_compiled(mode, precision)
        except UsageError as error:
            return Judged(Verdict.SKIP, f"not judged: {error}")
        except BaseException as error:  # noqa: BLE001  # of a check: the times remain
            return Judged(Verdict.SKIP, f"not judged: it raised {brief(as_result(error))}")

    def _judge_eager(self, precision: str) -> Judged:
        # TF32 keeps as many digits as float16, so that its error has the same limit; nothing is cast.
        dtype = torch.float16 if precision == "tf32" else PRECISIONS[precision] or torch.float32
        stats: NumericsStats = measure_numerics(
            self.subject,
            dtype,
            device=self.device,
            native=PRECISIONS[precision] is None,
            scales=None if self.scaled and precision == "float16" else (1.0,),
        ).stats
        if not self.trains:
            errors = tuple(error for error in stats.errors if error.kind != "gradient")
            faults = tuple(fault for fault in stats.faults if fault.where.phase != "backward")
            stats = replace(stats, errors=errors, faults=faults, no_backward="nothing is trained", prevented=False)
        findings = check_numerics(stats, self._limits(), VALUES)
        if precision == "float32":  # the user's own precision: its lost digits are no fault of a cell
            lossy = "precision-loss", Verdict.FAIL
            findings = [replace(f, verdict=Verdict.WARN) if (f.check, f.verdict) == lossy else f for f in findings]
        outputs = [error.error for error in stats.errors if error.kind == "output"]
        return judged(findings, VALUES, ["precision-loss"], max(outputs, default=None))

    def _judge_compiled(self, mode: str, precision: str) -> Judged:
        stats = measure_accuracy(
            self.subject,
            device=self.device,
            dtype=PRECISIONS[precision],
            optimizer=self.optimizer,
            options={"mode": mode},
            backward=self.trains,
        )
        outputs = [error.error for error in stats.errors if error.kind == "output"]
        findings = check_accuracy(stats, self._limits(), COMPILED)
        return judged(findings, COMPILED, COMPILED[: 1 + self.trains], max(outputs, default=None))

    def _limits(self) -> Limits:
        return load_settings().limits.with_(self.subject.limits, f"the subject {self.subject.name}")


def judged(
    findings: Iterable[Finding], checks: Iterable[str], needed: Iterable[str] = (), error: float | None = None
) -> Judged:
    """The worst finding of these checks, in their order.

    A skip counts for nothing next to another finding of its check. But a pass requires that each `needed` check, which
    compares numbers, has passed; otherwise the numbers are not known to be right.
    """
    order = {check: position for position, check in enumerate(checks)}
    known = [finding for finding in findings if finding.check in order]
    known.sort(key=lambda finding: (_ORDER.index(finding.verdict), order[finding.check]))
    if not known:
        return Judged(Verdict.SKIP, "no check had anything to judge", error)
    if known[0].verdict is Verdict.PASS:
        passed = {finding.check for finding in known if finding.verdict is Verdict.PASS}
        for check in needed:
            if check not in passed:
                why = next((finding.message for finding in known if finding.check == check), "it was not run")
                return Judged(Verdict.SKIP, f"not judged by {check}: {why}", error)
    return Judged(known[0].verdict, known[0].message, error)
