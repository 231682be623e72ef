"""Run experiments one after the other and collect their evidence in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ampcheck.autocast.device import Placement, place
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Run, Table, Verdict, merge
from ampcheck.lab.registry import Experiment, experiments_of
from ampcheck.torchtools.restore import restoring

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
    """Whether any finding is not a skip."""
    return any(finding.verdict is not Verdict.SKIP for finding in run.findings)
