"""Are the numbers of a cell right? Asked of the judges that audit a model: a fast cell with wrong numbers is no win.

A cell in eager mode is held against float64 by what rounding in its precision explains (`precision-loss` and the
checks beside it); digits that the model loses in float32 already are a warning. A compiled cell is held, beside that,
against eager mode and float64 (`compiled-error` and others).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampcheck.compiled.accuracy.checks import check_accuracy
from ampcheck.compiled.accuracy.judge import measure_accuracy
from ampcheck.core.errors import UsageError, as_result, brief
from ampcheck.core.limits import Limits, load_settings
from ampcheck.core.run import SEVERITY, Finding, Verdict
from ampcheck.core.subject import Subject
from ampcheck.numerics import NumericsStats, check_numerics, measure_numerics, measure_reference
from ampcheck.numerics.reference import Reference
from ampcheck.speed.steps import EAGER, PRECISIONS, Optimizer
from ampcheck.speed.tf32 import tf32

VALUES = ("precision-loss", "overflow", "nonfinite-gradient", "low-precision-error")
COMPILED = ("compiled-error", "compiled-gradient", "compiled-dtype", "compiled-exception")


@dataclass(frozen=True, slots=True)
class Judged:
    """What the judges say of one cell. error: the largest relative error of an output against float64."""

    verdict: Verdict
    why: str
    error: float | None = None

    def __add__(self, other: Judged) -> Judged:
        """The worse of two, not judged being worse than right, with the error of the second alone, which is the cell's
        own."""
        first = min(other, self, key=lambda one: SEVERITY.index(one.verdict))
        return Judged(first.verdict, first.why, other.error)


@dataclass(slots=True)
class Judge:
    """The judges of one subject; what several cells share is measured once.

    trains: whether gradients are judged. optimizer: of a training step, whose updates are judged. scaled: whether the
    loss is scaled, without which float16 loses small gradients. reset: after compiled cells Dynamo has forgotten
    everything.
    """

    subject: Subject
    device: str = "cpu"
    trains: bool = False
    optimizer: Optimizer | None = None
    scaled: bool = False
    _reference: Reference | None = None
    _eager: dict[str, Judged] = field(default_factory=dict)

    def of(self, mode: str, precision: str) -> Judged:
        """The verdict on a cell; one that cannot be judged is skipped, and says why."""
        try:
            eager = self._eager.get(precision) or self._in(precision, lambda: self._judge_eager(precision))
            self._eager[precision] = eager
            if mode == EAGER:
                return eager
            return eager + self._in(precision, lambda: self._judge_compiled(mode, precision))
        except UsageError as error:
            return Judged(Verdict.SKIP, f"not judged: {error}")
        except BaseException as error:  # noqa: BLE001  # a judge that fails judges nothing; the times stand
            return Judged(Verdict.SKIP, f"not judged: it raised {brief(as_result(error))}")

    def _in(self, precision: str, judge: Callable[[], Judged]) -> Judged:
        around: Callable[[], AbstractContextManager[Any]] = tf32(precision, torch.device(self.device).type)
        with around() if precision in ("float32", "tf32") else nullcontext():
            return judge()

    def _judge_eager(self, precision: str) -> Judged:
        if self._reference is None:
            self._reference = measure_reference(self.subject, device=self.device)
        # TF32 keeps as many digits as float16, so that its error has the same limit; nothing is cast.
        dtype = torch.float16 if precision == "tf32" else PRECISIONS[precision] or torch.float32
        measured = measure_numerics(
            self.subject,
            self._reference,
            dtype,
            device=self.device,
            native=PRECISIONS[precision] is None,
            scales=None if self.scaled and precision == "float16" else (1.0,),
        )
        stats: NumericsStats = measured.stats
        if not self.trains:
            errors = tuple(error for error in stats.errors if error.kind != "gradient")
            stats = replace(stats, errors=errors, no_backward="nothing is trained", prevented=False)
        findings = check_numerics(stats, self._limits(), VALUES)
        if precision == "float32":  # what users have already: digits that a model loses there are no cell's fault
            findings = [replace(f, verdict=Verdict.WARN) if _is_coarse(f) else f for f in findings]
        outputs = [error.error for error in stats.errors if error.kind == "output"]
        return judged(findings, VALUES, ("precision-loss",), max(outputs, default=None))

    def _judge_compiled(self, mode: str, precision: str) -> Judged:
        limits = self._limits()
        stats = measure_accuracy(
            self.subject,
            device=self.device,
            dtype=PRECISIONS[precision],
            optimizer=self.optimizer,
            options={"mode": mode},
            factor=limits.precision,
            backward=self.trains,
        )
        outputs = [found.compiled[0] for found in stats.deviations if found.kind == "output" and found.compiled]
        needed = ("compiled-error", "compiled-gradient") if self.trains else ("compiled-error",)
        return judged(check_accuracy(stats, limits, COMPILED), COMPILED, needed, max(outputs, default=None))

    def _limits(self) -> Limits:
        return load_settings().limits.with_(self.subject.limits, f"the subject {self.subject.name}")


def _is_coarse(finding: Finding) -> bool:
    return finding.check == "precision-loss" and finding.verdict is Verdict.FAIL


def judged(
    findings: Iterable[Finding], checks: Iterable[str], needed: Iterable[str] = (), error: float | None = None
) -> Judged:
    """The worst finding of these checks.

    A check that had nothing to look at says nothing beside one that had. But what is right has passed each `needed`
    check, which compares numbers: where one of them had nothing to look at, nothing is known.
    """
    known: Mapping[str, int] = {check: place for place, check in enumerate(checks)}
    told = [finding for finding in findings if finding.check in known]
    told.sort(key=lambda finding: (_ORDER.index(finding.verdict), known[finding.check]))
    if not told:
        return Judged(Verdict.SKIP, "no check had anything to look at", error)
    if told[0].verdict is Verdict.PASS:
        passed = {finding.check for finding in told if finding.verdict is Verdict.PASS}
        for check in needed:
            if check not in passed:
                why = next((finding.message for finding in told if finding.check == check), "it was not asked")
                return Judged(Verdict.SKIP, f"not judged by {check}: {why}", error)
    return Judged(told[0].verdict, told[0].message, error)


_ORDER = (*(verdict for verdict in SEVERITY if verdict is not Verdict.SKIP), Verdict.SKIP)
