"""The main event: one small transformer in four precisions, eager and compiled, from the same weights and data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ampcheck.autocast.missing import lacking
from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Finding, Marker, Run, Scalar, Series, Table, Where
from ampcheck.records.speed import TWIN, Rule, SpeedStats
from ampcheck.speed.clock import clock_of
from ampcheck.speed.compiling import many_compilations
from ampcheck.speed.judge import speed_run
from ampcheck.speed.memory import peak_memory
from ampcheck.speed.paired import measure_speed
from ampcheck.speed.verdict import check_speed, paired_ratio
from ampcheck.tools.lab.lab import Expectations, lacks, power, run_of
from ampcheck.tools.lab.loops import (
    AMP_FLOAT16,
    BETAS,
    EPS,
    FLOAT32,
    MODES,
    NAIVE,
    TOKENS,
    Loop,
    Mode,
    TrainingRun,
    train,
)

STEPS, FULL_STEPS = 60, 400
SLOW = 3.0
"""Arms that take this many times as long as eager float32 are timed in a measurement of their own."""
SEEDS = (1, 2)
"""Other weights and data in float32: their spread is the yardstick for the effect of a precision."""

BUDGET, FULL_BUDGET = 8.0, 30.0
"""Seconds of timed steps, for the quick arms and once more for the slow ones."""

_LEAST = 1e-8
"""Smaller distances are drawn here, since a logarithmic axis has no zero."""


@dataclass(frozen=True, slots=True)
class TrainingStats:
    """All runs. seeds: the last validation loss in float32 with other seeds. speeds: paired, against eager float32.
    lacking: runs that this machine has no tool for, with the reason; broken: runs that raised. moving: autocast float16
    once more, with a scaler that doubles its scale often."""

    device: str
    planned: int
    runs: tuple[TrainingRun, ...]
    seeds: tuple[float, ...]
    speeds: tuple[SpeedStats, ...]
    lacking: Mapping[str, str]
    broken: Mapping[str, str] = field(default_factory=dict)
    moving: TrainingRun | None = None

    @property
    def reference(self) -> TrainingRun | None:
        """float32 in eager mode."""
        return next((run for run in self.runs if run.mode == FLOAT32 and not run.compiled), None)


def growth_for(steps: int) -> int:
    """Good steps after which the scale of `moving` doubles: twelve doublings in a run, beyond the range of float16."""
    return max(2, steps // 12)


def measure_training(
    device: str = "cpu",
    *,
    steps: int = STEPS,
    budget: float = BUDGET,
    width: int = 64,
    modes: Sequence[Mode] = MODES,
    compiled: Sequence[bool] = (False, True),
    memory: bool = True,
    progress: Progress = silent,
) -> TrainingStats:
    """Train each mode for `steps` steps, or until it breaks; then time the steps of those that did not, in turn.

    The scaler has PyTorch's defaults: a skipped update would count as a loss of precision.
    """
    runs: dict[str, TrainingRun] = {}
    loops, seeds, moving = {}, [], None
    skipped: dict[str, str] = {}
    broken: dict[str, str] = {}
    arms = [(mode, choice) for mode in modes for choice in compiled]
    total = len(arms) + len(SEEDS) + 3
    with many_compilations(device):
        for number, (mode, choice) in enumerate(arms):
            name = f"{mode.name}, compiled" if choice else mode.name
            progress(name, number, total)
            if reason := lacks(format_of(mode.dtype).name, device):
                skipped[name] = reason
                continue
            try:
                loop = Loop(mode, device=device, compiled=choice, width=width)
                run = train(loop, steps)
            except Exception as error:  # noqa: BLE001  # what this machine lacks is skipped, any other error fails
                (skipped if lacking(error, kernels=True) else broken)[name] = brief(error)
                continue
            if run.stopped is None:
                loops[name] = loop
                if memory:
                    run = replace(run, peak=peak_memory(partial(loop.train, 0), device=device).bytes)
            runs[name] = run
        for number, seed in enumerate(SEEDS if FLOAT32.name in loops else ()):
            progress(f"float32 with seed {seed}", len(arms) + number, total)
            seeds.append(train(Loop(FLOAT32, device=device, seed=seed, width=width), steps).validation[-1][1])
        if AMP_FLOAT16.name in runs:
            progress("a loss scale that moves", total - 2, total)
            moving = train(Loop(AMP_FLOAT16, device=device, growth=growth_for(steps), width=width), steps)
        progress("step times in turn", total - 1, total)
        speeds = tuple(_timed(loops, device, budget)) if len(loops) > 1 and FLOAT32.name in loops else ()
    return TrainingStats(device, steps, tuple(runs.values()), tuple(seeds), speeds, skipped, broken, moving)


def _timed(loops: Mapping[str, Loop], device: str, budget: float) -> Iterator[SpeedStats]:
    """Each loop against eager float32; the slow ones in a measurement of their own."""
    steps = {name: partial(loop.train, 0) for name, loop in loops.items()}
    clock = clock_of(device)
    typical = {name: min(clock.block(step, 1) for _ in range(2)) for name, step in steps.items()}
    slow = [name for name, seconds in typical.items() if seconds > SLOW * typical[FLOAT32.name]]
    for group in ([name for name in steps if name not in slow], [FLOAT32.name, *slow]):
        if len(group) > 1:
            arms = {name: steps[name] for name in group}
            yield measure_speed(arms, subject="a training step", device=device, budget=budget, width=0.02)


def check_training(stats: TrainingStats) -> list[Finding]:
    """Which runs stay finite, how far they end from float32, the effect of a moving scale, and which are faster."""
    lab = Expectations("training", stats.device)
    for run in stats.runs:
        _check_finite(stats, run, lab)
    for name, reason in stats.broken.items():
        lab.expect(f"{name} runs", f"it raised {reason}", False, seen=0)
    reference = stats.reference
    if reference is not None and reference.stopped is None and stats.seeds:
        ends = (reference.validation[-1][1], *stats.seeds)
        spread = max(ends) - min(ends)
        for run in stats.runs:
            if run.stopped is None and run is not reference:
                distance = abs(run.validation[-1][1] - ends[0])
                expected = (
                    f"{run.name} ends within {spread:.3g} of eager float32 in its validation loss, the spread of "
                    f"{len(ends)} seeds of float32"
                )
                outcome, near, seen = f"{distance:.2g} away", distance <= spread, 1 + len(ends)
                lab.expect(expected, outcome, near, seen=seen, warns=True, observed=distance, limit=spread, unit="nats")
    if (moving := stats.moving) is not None:
        skipped = sum(step.skipped for step in moving.steps)
        expected = (
            f"a scaler that doubles its scale after {growth_for(stats.planned)} good steps overflows float16, skips "
            "that update, and the run stays finite"
        )
        outcome = f"{skipped} of {len(moving.steps)} updates skipped"
        outcome += "" if moving.stopped is None else f"; inf or NaN at step {moving.stopped}"
        lab.expect(expected, outcome, skipped > 0 and moving.stopped is None, seen=len(moving.steps), warns=True)
    for speeds in stats.speeds:
        lab.adopt(check_speed(speeds, Rule(1.0, comparisons=len(speeds.compared), false_alarms=0.05)), warns=True)
    lab.skip(*(f"{name}: {reason}" for name, reason in stats.lacking.items()))
    return lab.findings


def _check_finite(stats: TrainingStats, run: TrainingRun, lab: Expectations) -> None:
    last, where = run.steps[-1], Where()
    outcome = f"so it did; the last loss is {last.loss:.4g}"
    if run.stopped is not None:
        outcome = f"at step {run.stopped} (loss {last.loss:.4g}, gradient norm {last.norm:.3g}) it left inf or NaN"
    if run.culprit is not None:
        where = replace(run.culprit.where, step=run.stopped)
        outcome += f"; the first op that produced one from finite numbers is {where.op} in {where.phase}"
        outcome += f", {where.module}" if where.module else ""
        outcome += f": {run.culprit.elements:,} elements in {run.culprit.dtype}"
        outcome += " (found in eager mode)" if run.compiled else ""
    expected, right = f"{run.name} stays finite for {stats.planned} steps", run.stopped is None
    if run.mode == NAIVE:
        edge, share = format_of("float16").flushes_at, 1 - BETAS[1]
        assert edge >= EPS, "the sentence below says so"
        right = not right
        expected = (
            f"{run.name} breaks: eps of AdamW, {EPS:g}, is at most {power(edge)} and so zero in float16, and so is "
            f"{share:.3g} times the square of each gradient up to {math.sqrt(edge / share):.2g}: AdamW divides by zero"
        )
    lab.expect(expected, outcome, right, seen=len(run.steps), warns=True, where=where)


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of results, speeds and memory; charts of losses, gradient norm, loss scale and step time."""
    steps, budget, width = (FULL_STEPS, FULL_BUDGET, 128) if full else (STEPS, BUDGET, 64)
    stats = measure_training(device, steps=steps, budget=budget, width=width, progress=progress)
    if not stats.runs and not stats.broken:
        raise UsageError(f"no precision could be trained in: {'; '.join(stats.lacking.values())}")
    seen = {"training steps": sum(len(run.steps) for run in stats.runs), "training runs": len(stats.runs)}
    broken = [f"{name}: {reason}" for name, reason in stats.broken.items()]
    return run_of(check_training(stats), seen, tables=tables(stats), charts=charts(stats), unseen=broken)


def tables(stats: TrainingStats) -> tuple[Table, ...]:
    """The results of the runs, and the cost of a step."""
    rows: list[tuple[Scalar, ...]] = []
    for run in stats.runs:
        last, losses = run.steps[-1], (run.steps[0].loss, run.steps[-1].loss)
        validation = run.validation[-1][1] if run.stopped is None else None
        norm = next((step.norm for step in reversed(run.steps) if math.isfinite(step.norm)), None)
        skipped = sum(step.skipped for step in run.steps)
        scale = f"{last.scale:g}" if run.mode.scaled else None
        outcome = "finite" if run.stopped is None else f"inf or NaN at step {run.stopped}"
        outcome += f", {run.culprit.where.op} in {run.culprit.where.phase}" if run.culprit is not None else ""
        rows.append((run.name, len(run.steps), *losses, validation, norm, skipped, scale, outcome))
    losses_and_norm = ("first loss", "last loss", "validation loss", "gradient norm")
    columns = ("run", "steps", *losses_and_norm, "steps skipped", "loss scale", "outcome")
    note = (
        "Losses in nats a character. A skipped step: the scaled gradients overflowed, and the scaler halved its scale. "
        "The scaler has PyTorch's defaults: 2^16, doubled after 2,000 good steps."
    )
    results = Table(f"The results of {stats.planned} steps", columns, rows, note=note)
    return (results, _costs(stats)) if stats.speeds else (results,)


def _costs(stats: TrainingStats) -> Table:
    runs = {run.name: run for run in stats.runs}
    rows: dict[str, tuple[Scalar, ...]] = {}
    for speeds in stats.speeds:
        for arm in (speeds.reference, *speeds.compared):
            ratio, run = paired_ratio(speeds.reference, arm), runs[arm.name]
            peak = run.peak / 2**20 if run.peak is not None else None
            ratios = (f"{ratio.median:.3g}", f"{ratio.low:.3g} to {ratio.high:.3g}")
            times = (1000 * arm.median, round(TOKENS / arm.median), *ratios)
            rows.setdefault(arm.name, (arm.name, *times, len(arm.seconds), peak, run.first))
    time_columns = ("ms a step", "tokens a second", "times as fast", "95 % interval")
    note = (
        f"{TOKENS} tokens a step. Times as fast as eager float32: paired, all arms in turn in the same minutes. Peak: "
        "tensors of a step beyond weights and moments. First step: with compilation, or from PyTorch's caches. Runs "
        "that broke are not timed."
    )
    columns = ("run", *time_columns, "cycles", "peak, MiB", "first step, s")
    return Table("What a step costs", columns, list(rows.values()), note=note)


def charts(stats: TrainingStats) -> tuple[Chart, ...]:
    """Losses, distance from float32, gradient norm, loss scale, step time."""
    eager = {run.mode for run in stats.runs if not run.compiled}
    # A compiled run would hide the eager one, in its colour; the chart of distances separates them.
    drawn = [run for run in stats.runs if not (run.compiled and run.mode in eager)]
    stops = [(run.mode.name, run.stopped) for run in stats.runs if run.stopped is not None and not run.compiled]
    markers = [Marker(name, float(stopped), "inf or NaN") for name, stopped in stops]
    overlap = (
        "Lines that coincide are the result: a precision that lost something leaves the others. A line that would be "
        "hidden is drawn wider. Compiled runs: see the distance from eager float32."
    )
    losses = [_series(run, [step.loss for step in run.steps]) for run in drawn]
    norms = [_series(run, [step.norm for step in run.steps]) for run in drawn]
    validation = [
        _series(run, [loss for _, loss in run.validation], [float(step) for step, _ in run.validation])
        for run in stats.runs
    ]
    unseen = "On text that no run learns from, computed in eager mode in each run's precision."
    lines = [
        _line("Training loss", "loss, nats", losses, overlap, markers=markers),
        _line("Validation loss", "loss, nats", validation, unseen),
        _line("Gradient norm", "norm of all gradients", norms, overlap, markers=markers),
    ]
    reference = stats.reference
    others = [run for run in stats.runs if run is not reference]  # one that broke has a point, and so its colour
    if reference is not None and others:
        exact = [step.loss for step in reference.steps]
        distances = [
            _series(run, [max(abs(step.loss - loss), _LEAST) for step, loss in zip(run.steps, exact, strict=False)])
            for run in others
        ]
        note = f"The same data in each step. Differences below {_LEAST:g} are drawn there."
        label = "difference of the training losses, nats"
        lines.insert(2, _line("Distance from eager float32", label, distances, note, "log"))
    if (moving := stats.moving) is not None:
        markers = [Marker("skipped", float(n), "step skipped") for n, step in enumerate(moving.steps) if step.skipped]
        scales = [_series(moving, [math.log2(step.scale) for step in moving.steps])]
        note = (
            f"A separate eager run: GradScaler doubles its scale after {growth_for(stats.planned)} good steps "
            "(PyTorch's default: 2,000), and halves it when a gradient overflows, skipping that step: "
            f"{len(markers)} of {len(moving.steps)} here."
        )
        lines.append(_line("A loss scale that moves", "loss scale", scales, note, "exponent", markers))
    for number, speeds in enumerate(stats.speeds):  # arms that were not timed in turn are not comparable
        (chart,) = speed_run(speeds).charts
        title = "Step time of the runs that take much longer" if number else "Step time"
        note = (
            f"Dot: median; bar: 5th to 95th percentile. {TWIN}: {speeds.reference.name} timed a second time in each "
            "turn; differences as small as between these two are noise."
        )
        lines.append(replace(chart, title=title, note=note))
    return tuple(lines)


def _series(run: TrainingRun, y: list[float], x: Sequence[float] = ()) -> Series:
    steps = x or [float(step) for step in range(len(y))]
    return Series(run.mode.name, steps, y, group="compiled" if run.compiled else "")


def _line(
    title: str, label: str, series: list[Series], note: str, scale: str = "linear", markers: Sequence[Marker] = ()
) -> Chart:
    return Chart("line", title, "step", label, series, note=note, markers=markers, y_scale=scale)
