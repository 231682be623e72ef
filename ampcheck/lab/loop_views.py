"""The training runs of the lab as tables and charts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ampcheck.core.run import Chart, Marker, Scalar, Series, Table
from ampcheck.lab.registry import check_of
from ampcheck.lab.training_stats import TrainingRun, TrainingStats
from ampcheck.speed.interval import paired_ratio
from ampcheck.speed.judge import speed_run
from ampcheck.speed.stats import TWIN

CHECK = check_of("training")

_LEAST = 1e-8
"""Distances below are drawn here, since a logarithmic axis has no zero."""


def tables(stats: TrainingStats) -> tuple[Table, ...]:
    """What the runs came to, and what a step costs."""
    rows: list[tuple[Scalar, ...]] = []
    for run in stats.runs:
        last = run.steps[-1]
        norms = [step.norm for step in run.steps if math.isfinite(step.norm)]
        rows.append(
            (
                run.name,
                len(run.steps),
                run.steps[0].loss,
                last.loss,
                run.validation[-1][1] if run.stopped is None else None,
                norms[-1] if norms else None,
                sum(step.skipped for step in run.steps),
                f"{last.scale:g}" if run.mode.scaled else None,
                _outcome(run),
            )
        )
    result = Table(
        f"What {stats.planned} steps came to",
        (
            "run", "steps", "first loss", "last loss", "validation loss", "gradient norm", "steps skipped", "loss "
            "scale",
            "outcome",
        ),
        rows,
        check=CHECK.slug,
        note="Losses in nats a character. A skipped step: the scaled gradients overflowed, and the scaler halved its "
        "scale. The scaler has PyTorch's defaults: 2^16, doubled after 2,000 good steps.",
    )  # fmt: skip
    return (result, *([_costs(stats)] if stats.speeds else []))


def _outcome(run: TrainingRun) -> str:
    if run.stopped is None:
        return "finite"
    culprit = f", {run.culprit.where.op} in {run.culprit.where.phase}" if run.culprit is not None else ""
    return f"inf or NaN at step {run.stopped}{culprit}"


def _costs(stats: TrainingStats) -> Table:
    runs = {run.name: run for run in stats.runs}
    rows: dict[str, tuple[Scalar, ...]] = {}
    for speeds in stats.speeds:
        for arm in (speeds.reference, *speeds.compared):
            ratio = paired_ratio(speeds.reference, arm)
            peak = runs[arm.name].peak
            rows.setdefault(
                arm.name,
                (
                    arm.name,
                    1000 * arm.median,
                    round(stats.tokens / arm.median),
                    f"{ratio.median:.3g}",
                    f"{ratio.low:.3g} to {ratio.high:.3g}",
                    len(arm.seconds),
                    peak.bytes / 2**20 if peak.bytes is not None else None,
                    runs[arm.name].first,
                ),
            )
    return Table(
        "What a step costs",
        (
            "run",
            "ms a step",
            "tokens a second",
            "times as fast",
            "95 % interval",
            "cycles",
            "peak, MiB",
            "first step, s",
        ),
        list(rows.values()),
        check=CHECK.slug,
        note=f"{stats.tokens} tokens a step. Times as fast as eager float32: paired, all arms in turn in the same "
        "minutes. Peak: tensors of a step beyond weights and moments. First step: with compilation, or from PyTorch's "
        "caches. Runs that broke are not timed.",
    )


def charts(stats: TrainingStats) -> tuple[Chart, ...]:
    """Losses, distance from float32, gradient norm, loss scale, step time."""
    made = [
        _over_steps(stats, "Training loss", "loss, nats", lambda run: [step.loss for step in run.steps]),
        _validation(stats),
        *_distances(stats),
        _over_steps(stats, "Gradient norm", "norm of all gradients", lambda run: [step.norm for step in run.steps]),
        *_scales(stats),
    ]
    return (*made, *_times(stats))


def _times(stats: TrainingStats) -> list[Chart]:
    """Step times, a chart for each measurement: arms that were not timed in turn are not comparable."""
    made = []
    for number, speeds in enumerate(stats.speeds):
        (chart,) = speed_run(speeds).charts
        title = "Step time" if not number else "Step time of the runs that take much longer"
        note = (
            f"Dot: median; bar: 5th to 95th percentile. {TWIN}: {speeds.reference.name} timed a second time in each "
            "turn; what lies between the two is noise."
        )
        made.append(replace(chart, check=CHECK.slug, title=title, note=note))
    return made


def _over_steps(
    stats: TrainingStats, title: str, label: str, values: Callable[[TrainingRun], list[float]], note: str = ""
) -> Chart:
    eager = {run.mode for run in stats.runs if not run.compiled}
    series = []
    for run in stats.runs:
        if run.compiled and run.mode in eager:
            continue  # it would hide the eager one, in its colour; the chart of distances tells them apart
        y = values(run)
        series.append(_series(run, [float(step) for step in range(len(y))], y))
    broken = [
        Marker(run.mode.name, float(run.stopped), "inf or NaN")
        for run in stats.runs
        if run.stopped is not None and not run.compiled
    ]
    note = note or (
        "Lines that lie on each other are the result: only what leaves the others has lost something. What another "
        "line would hide is drawn wider. Compiled runs: see the distance from eager float32."
    )
    return Chart(
        "line", title, "step", label, series=series, check=CHECK.slug, note=note, markers=broken, y_scale="linear"
    )


def _series(run: TrainingRun, x: list[float], y: list[float]) -> Series:
    return Series(run.mode.name, x, y, group="compiled" if run.compiled else "")


def _validation(stats: TrainingStats) -> Chart:
    series = [
        _series(run, [float(step) for step, _ in run.validation], [loss for _, loss in run.validation])
        for run in stats.runs
    ]
    note = "On text that no run learns from, computed in eager mode in each run's precision."
    return Chart(
        "line", "Validation loss", "step", "loss, nats", series=series, check=CHECK.slug, note=note, y_scale="linear"
    )


def _distances(stats: TrainingStats) -> list[Chart]:
    reference = stats.reference
    others = [run for run in stats.runs if run is not reference]  # one that broke has a point, and so its colour
    if reference is None or not others:
        return []
    series = []
    for run in others:
        pairs = zip(run.steps, reference.steps, strict=False)
        y = [max(abs(one.loss - other.loss), _LEAST) for one, other in pairs]
        series.append(_series(run, [float(step) for step in range(len(y))], y))
    return [
        Chart(
            "line",
            "Distance from eager float32",
            "step",
            "difference of the training losses, nats",
            series=series,
            check=CHECK.slug,
            note=f"The same data in each step. Differences below {_LEAST:g} are drawn there.",
            y_scale="log",
        )
    ]


def _scales(stats: TrainingStats) -> list[Chart]:
    run = stats.moving
    if run is None:
        return []
    skipped = [
        Marker("skipped", float(number), "step skipped") for number, step in enumerate(run.steps) if step.skipped
    ]
    return [
        Chart(
            "line",
            "A loss scale that moves",
            "step",
            "loss scale",
            series=[
                Series(
                    run.mode.name,
                    [float(number) for number in range(len(run.steps))],
                    [math.log2(step.scale) for step in run.steps],
                )
            ],
            check=CHECK.slug,
            note=f"A run of its own, in eager mode, beside those above: GradScaler doubles its scale after "
            f"{stats.growth} good steps here, so that it is seen to move (PyTorch's default is 2,000), and halves it "
            f"when a gradient overflows, leaving that step out: {len(skipped)} of {len(run.steps)} here.",
            markers=skipped,
            y_scale="exponent",
        )
    ]
