"""The expectations of experiments, and their evidence in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from ampcheck.autocast.device import Placement, place
from ampcheck.core.arm import Arm
from ampcheck.core.check import Evidence
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Coverage, Finding, Run, Table, Verdict, merge
from ampcheck.tools.lab.registry import Experiment, experiments_of
from ampcheck.torchtools.restore import restoring

if TYPE_CHECKING:
    from typing_extensions import Unpack


ARITHMETIC = ("float32", "bfloat16", "float16")
"""Formats in which PyTorch computes everywhere, widest first."""


class Expectations:
    """Collects the findings of an experiment: expectations with their outcome, and the reasons of what was skipped."""

    def __init__(self, experiment: str, device: str) -> None:
        self.findings: list[Finding] = []
        self._check, self._device = experiments_of([experiment])[0].check, device

    def expect(
        self, expected: str, outcome: str, holds: bool, *, seen: int, warns: bool = False, **evidence: Unpack[Evidence]
    ) -> Finding:
        """Record one expectation and return its finding.

        seen: number of compared values, modules or updates. warns: a violation warns instead of failing, for what
        follows from experience and not from the format.
        """
        message = f"expected: {expected}; observed: {outcome}"
        if holds:
            finding = self._check.passed(self._device, message, seen, **evidence)
        else:
            finding = (self._check.warn if warns else self._check.fail)(self._device, message, **evidence)
        self.findings.append(finding)
        return finding

    def at_most(
        self, expected: str, observed: float, limit: float, *, seen: int, warns: bool = False, hint: str = ""
    ) -> None:
        """Record the expectation that `observed` is at most `limit`."""
        outcome, holds = f"{observed:.2g}", observed <= limit
        self.expect(expected, outcome, holds, seen=seen, warns=warns, observed=observed, limit=limit, hint=hint)

    def skip(self, *reasons: str) -> None:
        """Record what was not measured."""
        self.findings += [self._check.skip(self._device, reason) for reason in reasons]

    def adopt(self, findings: Iterable[Finding], *, warns: bool = False) -> None:
        """Add the findings of another check as the experiment's own. warns: failures become warnings without a hint."""
        for finding in findings:
            own = replace(finding, check=self._check.slug, subject=self._device, arm=Arm())
            if warns:
                verdict = Verdict.WARN if own.verdict is Verdict.FAIL else own.verdict
                own = replace(own, verdict=verdict, hint="")
            self.findings.append(own)


def run_of(
    findings: Sequence[Finding],
    seen: Mapping[str, int],
    *,
    tables: Iterable[Table] = (),
    charts: Iterable[Chart] = (),
    unseen: Iterable[str] = (),
) -> Run:
    """The run of an experiment. unseen: why something was not measured, besides the reasons of skips."""
    skipped = (finding.message for finding in findings if finding.verdict is Verdict.SKIP)
    coverage = Coverage(seen, dict.fromkeys((*skipped, *unseen), 1))
    return Run(findings=tuple(findings), coverage=coverage, tables=tuple(tables), charts=tuple(charts))


def lacks(name: str, device: str) -> str:
    """Why a device cannot compute in a format; "" where it can."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        return f"this PyTorch has no dtype {name}"
    try:
        torch.ones(2, dtype=dtype, device=device).mul(2).add(1).cpu()
    except Exception as error:  # noqa: BLE001  # each backend has an exception of its own
        return f"{device} does not compute in {name}: {brief(error)}"
    return ""


def usable(names: Iterable[str], device: str) -> tuple[dict[str, torch.dtype], dict[str, str]]:
    """The dtypes of the formats in which a device computes, and why it does not compute in the others."""
    reasons = {name: lacks(name, device) for name in names}
    dtypes: dict[str, torch.dtype] = {name: getattr(torch, name) for name, reason in reasons.items() if not reason}
    return dtypes, {name: reason for name, reason in reasons.items() if reason}


def power(value: float) -> str:
    """A power of two as `2^-25`, anything else as a number."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:.6g}"


Ended: TypeAlias = Callable[[Experiment, Run], None]
"""Called with each experiment and its run as soon as it ends."""


@restoring
def run_lab(
    names: Sequence[str] = (),
    *,
    device: str = "cpu",
    full: bool = False,
    progress: Progress = silent,
    ended: Ended = lambda experiment, run: None,
) -> Run:
    """Run the experiments of these names, or all, on a device.

    full: longer, with more modes. On an absent device only experiments of autocast's policy run, on the CPU under that
    policy. An experiment for which this machine lacks something is skipped with the reason; one that judges nothing
    fails. ended: called after each experiment, so that the results so far survive an interruption.

    Raises `UsageError` for an unknown experiment or device.
    """
    chosen = experiments_of(names)
    placement = place(device)
    runs, rows = [], []
    for number, experiment in enumerate(chosen):

        def overall(stage: str, done: int, total: int, number: int = number, title: str = experiment.title) -> None:
            progress(f"{title}: {stage}", 100 * number + 100 * done // max(total, 1), 100 * len(chosen))

        overall("begins", 0, 1)
        begin = time.perf_counter()
        run = labelled(_run(experiment, placement, device, full, overall), experiment)
        seconds = time.perf_counter() - begin
        runs.append(run)
        ended(experiment, run)
        passed, skipped = len(run.of(Verdict.PASS)), len(run.of(Verdict.SKIP)) + len(run.of(Verdict.UNDECIDED))
        violated = len(run.findings) - passed - skipped
        rows.append((experiment.name, experiment.title, round(seconds, 1), passed, violated, skipped))
    columns = ("experiment", "what it shows", "seconds", "as expected", "not", "skipped or undecided")
    whole = merge((*runs, Run(tables=(Table("The experiments", columns, rows),))))
    return replace(whole, environment=environment(placement.device), title=f"the lab on {placement}")


def labelled(run: Run, experiment: Experiment) -> Run:
    """Name the experiment's check in its tables and charts; the first of them begins with what it shows."""
    check = experiment.check.slug
    tables = [replace(table, check=check) for table in run.tables]
    charts = [replace(chart, check=check) for chart in run.charts]
    if tables:
        tables[0] = replace(tables[0], note=f"{experiment.about} {tables[0].note}".strip())
    elif charts:
        charts[0] = replace(charts[0], note=f"{experiment.about} {charts[0].note}".strip())
    return replace(run, tables=tuple(tables), charts=tuple(charts))


def _run(experiment: Experiment, placement: Placement, device: str, full: bool, progress: Progress) -> Run:
    def without(verdict: Verdict, reason: str) -> Run:
        finding = experiment.check.finding(verdict, str(placement), reason)
        return Run(findings=(finding,), coverage=Coverage({}, {reason: 1}))

    if placement.emulated and not experiment.emulated:
        return without(Verdict.SKIP, f"{experiment.name} needs the device itself, and {device} is not there")
    target = device if experiment.emulated else placement.device
    try:
        run = experiment.function(device=target, full=full, progress=progress)
    except UsageError as error:
        return without(Verdict.SKIP, f"{experiment.title}: {error}")
    except Exception as error:  # noqa: BLE001  # reported as a failure; the other experiments run
        return without(Verdict.FAIL, f"{experiment.title} must run to its end; it raised {brief(error)}")
    if run.findings and (run.coverage.total or not run.of(Verdict.PASS)):
        return run
    reason = f"{experiment.title} looked at {run.coverage} and judged {len(run.findings)} expectations: no evidence"
    return merge((run, without(Verdict.FAIL, reason)))


def judged(run: Run) -> bool:
    """Return whether any finding is not a skip."""
    return any(finding.verdict is not Verdict.SKIP for finding in run.findings)
