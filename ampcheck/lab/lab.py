"""Run experiments one after the other and put what they saw into one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ampcheck.autocast.device import Placement, place
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Run, Scalar, Table, Verdict, merge
from ampcheck.lab.registry import Experiment, experiments_of
from ampcheck.torchtools.restore import restoring

Ended: TypeAlias = Callable[[Experiment, Run], None]
"""Is given each experiment with its run as soon as it ends."""


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

    full: longer, with more ways. On a device that is not there only what autocast's policy says of it is shown, with
    the CPU under that policy. An experiment that this machine lacks something for is skipped, with the reason; one that
    judges nothing fails. ended: is told of each before the next begins, so that what is known by then is not lost.

    Raises `UsageError` for an unknown experiment or device.
    """
    chosen = experiments_of(names)
    placement = place(device)
    runs, rows = [], []
    for number, experiment in enumerate(chosen):

        def told(stage: str, done: int, total: int, number: int = number, title: str = experiment.title) -> None:
            progress(f"{title}: {stage}", 100 * number + 100 * done // max(total, 1), 100 * len(chosen))

        told("begins", 0, 1)
        begin = time.perf_counter()
        run = introduced(_run(experiment, placement, device, full, told), experiment)
        seconds = time.perf_counter() - begin
        runs.append(run)
        ended(experiment, run)
        row: tuple[Scalar, ...] = (experiment.name, experiment.title, round(seconds, 1), *_counts(run))
        rows.append(row)
    columns = ("experiment", "what it shows", "seconds", "as expected", "not", "skipped or undecided")
    overview = Table("The experiments", columns, rows)
    return replace(
        merge((*runs, Run(tables=(overview,)))),
        environment=environment(placement.device),
        title=f"the lab on {placement}",
    )


def introduced(run: Run, experiment: Experiment) -> Run:
    """A run whose first piece of evidence says what one sees."""
    if run.tables:
        first, *tables = run.tables
        return replace(run, tables=(replace(first, note=_joined(experiment.about, first.note)), *tables))
    if run.charts:
        chart, *charts = run.charts
        return replace(run, charts=(replace(chart, note=_joined(experiment.about, chart.note)), *charts))
    return run


def _joined(about: str, note: str) -> str:
    return f"{about} {note}".strip()


def _run(experiment: Experiment, placement: Placement, device: str, full: bool, progress: Progress) -> Run:
    if placement.emulated and not experiment.emulated:
        why = f"{experiment.name} needs the device itself, and {device} is not there"
        return _without(experiment, Verdict.SKIP, str(placement), why)
    try:
        run = experiment.function(
            device=device if experiment.emulated else placement.device, full=full, progress=progress
        )
    except UsageError as error:
        return _without(experiment, Verdict.SKIP, str(placement), f"{experiment.title}: {error}")
    except Exception as error:  # noqa: BLE001  # the others go on, and this one is told
        why = f"{experiment.title} must run to its end; it raised {brief(error)}"
        return _without(experiment, Verdict.FAIL, str(placement), why)
    if run.findings and (run.coverage.total or not run.of(Verdict.PASS)):
        return run
    why = f"{experiment.title} looked at {run.coverage} and judged {len(run.findings)} expectations: that shows nothing"
    return merge((run, _without(experiment, Verdict.FAIL, str(placement), why)))


def judged(run: Run) -> bool:
    """Whether anything at all was: what was skipped was not."""
    return any(finding.verdict is not Verdict.SKIP for finding in run.findings)


def _without(experiment: Experiment, verdict: Verdict, subject: str, why: str) -> Run:
    return Run(findings=(experiment.check.finding(verdict, subject, why),), coverage=Coverage({}, {why: 1}))


def _counts(run: Run) -> tuple[int, int, int]:
    passed, skipped = len(run.of(Verdict.PASS)), len(run.of(Verdict.SKIP)) + len(run.of(Verdict.UNDECIDED))
    return passed, len(run.findings) - passed - skipped, skipped
