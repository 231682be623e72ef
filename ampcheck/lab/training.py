"""The main event: one small transformer in four precisions, eager and compiled, from the same weights and data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ampcheck.core.errors import UsageError, brief
from ampcheck.core.formats import format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Verdict
from ampcheck.lab import loop_views
from ampcheck.lab.expectations import Expectations, lacks, missing, power, synchronize
from ampcheck.lab.loops import (
    AMP_FLOAT16,
    BETAS,
    EPS,
    FLOAT32,
    MODES,
    NAIVE,
    Loop,
    Mode,
    StepSeen,
)
from ampcheck.lab.registry import check_of
from ampcheck.lab.training_stats import TrainingRun, TrainingStats, growth_for
from ampcheck.speed.compiling import many_compilations
from ampcheck.speed.memory import peak_memory
from ampcheck.speed.paired import Step, measure_speed
from ampcheck.speed.stats import SpeedStats
from ampcheck.speed.verdict import Rule, check_speed

CHECK = check_of("training")

STEPS, FULL_STEPS = 60, 400
VALIDATE_EVERY = 10
SLOW = 3.0
"""Arms that take this many times as long as eager float32 are timed in a measurement of their own."""
SEEDS = (1, 2)
"""Other weights and data in float32: what they change is the yardstick for what a precision changes."""

BUDGET, FULL_BUDGET = 8.0, 30.0
"""Seconds of timed steps, for the quick arms and once more for the slow ones."""


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

    The scaler has PyTorch's defaults: an update that it leaves out would be counted as a loss of precision.
    """
    runs, loops = [], {}
    lacking: dict[str, str] = {}
    broken: dict[str, str] = {}
    arms = [(mode, way) for mode in modes for way in compiled]
    total = len(arms) + len(SEEDS) + 3
    with many_compilations(device):
        for number, (mode, way) in enumerate(arms):
            name = TrainingRun(mode, way, (), (), 0.0).name
            progress(name, number, total)
            if why := lacks(format_of(mode.dtype).name, device):
                lacking[name] = why
                continue
            try:
                loop = Loop(mode, device=device, compiled=way, width=width)
                run = train(loop, steps, compiled=way)
            except Exception as error:  # noqa: BLE001  # told below: what lacks is skipped, what raises fails
                (lacking if missing(error) else broken)[name] = brief(error)
                continue
            if run.stopped is None:
                loops[name] = loop
                if memory:
                    run = replace(run, peak=peak_memory(partial(loop.train, 0), device=device))
            runs.append(run)
        seeds = []
        for number, seed in enumerate(SEEDS if FLOAT32.name in loops else ()):
            progress(f"float32 with seed {seed}", len(arms) + number, total)
            seeds.append(train(Loop(FLOAT32, device=device, seed=seed, width=width), steps).validation[-1][1])
        moving = None
        if AMP_FLOAT16.name in {run.name for run in runs}:
            progress("a loss scale that moves", total - 2, total)
            moving = train(Loop(AMP_FLOAT16, device=device, growth=growth_for(steps), width=width), steps)
        progress("step times in turn", total - 1, total)
        speeds = tuple(_timed(loops, device, budget)) if len(loops) > 1 and FLOAT32.name in loops else ()
    return TrainingStats(device, steps, tuple(runs), tuple(seeds), speeds, lacking, broken, moving)


def train(loop: Loop, steps: int, *, compiled: bool = False) -> TrainingRun:
    """Run a loop for so many steps, or up to the first that leaves a loss or a weight infinite or NaN."""
    seen: list[StepSeen] = []
    validation = [(0, loop.validate())]
    first = 0.0
    for number in range(steps):
        before = loop.state()
        begin = time.perf_counter()
        seen.append(loop.step(number))
        first = first or time.perf_counter() - begin
        if not math.isfinite(seen[-1].loss) or not loop.finite():
            culprit = loop.culprit(before, number)
            return TrainingRun(loop.mode, compiled, tuple(seen), tuple(validation), first, number, culprit)
        if (number + 1) % VALIDATE_EVERY == 0 or number + 1 == steps:
            validation.append((number + 1, loop.validate()))
    return TrainingRun(loop.mode, compiled, tuple(seen), tuple(validation), first)


def _timed(loops: Mapping[str, Loop], device: str, budget: float) -> Iterator[SpeedStats]:
    """Each loop against eager float32; those that take much longer in a measurement of their own, as in the matrix."""
    steps = {name: partial(loop.train, 0) for name, loop in loops.items()}
    typical = {name: min(_seconds(step, device) for _ in range(2)) for name, step in steps.items()}
    reference = typical[FLOAT32.name]
    slow = [name for name, seconds in typical.items() if seconds > SLOW * reference]
    for group in ([name for name in steps if name not in slow], [FLOAT32.name, *slow]):
        if len(group) > 1:
            arms = {name: steps[name] for name in group}
            yield measure_speed(arms, subject="a training step", device=device, budget=budget, width=0.02)


def _seconds(step: Step, device: str) -> float:
    synchronize(device)
    begin = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - begin


def check_training(stats: TrainingStats) -> list[Finding]:
    """Which runs stay finite, how far they end from float32, what a moving scale does, and which are faster."""
    lab = Expectations(CHECK, stats.device)
    lab.findings += [_finite(stats, run) for run in stats.runs]
    for name, why in stats.broken.items():
        lab.expect(f"{name} runs", f"it raised {why}", False, seen=0)
    lab.findings += _close(stats)
    if stats.moving is not None:
        lab.findings.append(_moving(stats, stats.moving))
    for speeds in stats.speeds:
        rule = Rule(1.0, comparisons=len(speeds.compared), false_alarms=0.05)
        for one in check_speed(speeds, rule):
            verdict = Verdict.WARN if one.verdict is Verdict.FAIL else one.verdict
            lab.findings.append(replace(one, check=CHECK.slug, subject=stats.device, verdict=verdict, hint=""))
    for name, why in stats.lacking.items():
        lab.skip(f"{name}: {why}")
    return lab.findings


def _finite(stats: TrainingStats, run: TrainingRun) -> Finding:
    if run.stopped is None:
        found = f"so it did; the last loss is {run.steps[-1].loss:.4g}"
    else:
        last = run.steps[-1]
        found = f"at step {run.stopped} (loss {last.loss:.4g}, gradient norm {last.norm:.3g}) it left inf or NaN"
        if run.culprit is not None:
            where = run.culprit.where
            found += f"; the first op that made one of finite numbers is {where.op} in {where.phase}"
            found += f", {where.module}" if where.module else ""
            found += f": {run.culprit.elements:,} elements in {run.culprit.dtype}"
            found += " (found in eager mode)" if run.compiled else ""
    steps = len(run.steps)
    if run.mode == NAIVE:
        edge = format_of("float16").flushes_at
        least = math.sqrt(edge / (1 - BETAS[1]))
        assert edge >= EPS, "the sentence below says so"
        expected = (
            f"{run.name} breaks: eps of AdamW, {EPS:g}, is at most {power(edge)} and so zero in float16, and so is "
            f"{1 - BETAS[1]:.3g} times the square of each gradient up to {least:.2g}: AdamW divides by zero"
        )
        made = Expectations(CHECK, stats.device).expect(
            expected, found, run.stopped is not None, seen=steps, warns=True
        )
    else:
        expected = f"{run.name} stays finite for {stats.planned} steps"
        made = Expectations(CHECK, stats.device).expect(expected, found, run.stopped is None, seen=steps, warns=True)
    if run.culprit is not None:
        made = replace(made, where=replace(run.culprit.where, step=run.stopped))
    return made


def _moving(stats: TrainingStats, run: TrainingRun) -> Finding:
    left = sum(step.skipped for step in run.steps)
    expected = (
        f"a scaler that doubles its scale after {stats.growth} good steps reaches what float16 does not hold, leaves "
        "that update out, and the run stays finite"
    )
    found = f"{left} of {len(run.steps)} updates left out"
    found += "" if run.stopped is None else f"; inf or NaN at step {run.stopped}"
    right = left > 0 and run.stopped is None
    return Expectations(CHECK, stats.device).expect(expected, found, right, seen=len(run.steps), warns=True)


def _close(stats: TrainingStats) -> list[Finding]:
    reference = stats.reference
    if reference is None or reference.stopped is not None or not stats.seeds:
        return []
    own = reference.validation[-1][1]
    spread = max(own, *stats.seeds) - min(own, *stats.seeds)
    lab = Expectations(CHECK, stats.device)
    for run in stats.runs:
        if run.stopped is None and run is not reference:
            distance = abs(run.validation[-1][1] - own)
            expected = (
                f"{run.name} ends as near to eager float32 in its validation loss as {1 + len(stats.seeds)} seeds of "
                f"float32 lie apart, {spread:.3g}"
            )
            lab.expect(
                expected,
                f"{distance:.2g} away",
                distance <= spread,
                seen=2 + len(stats.seeds),
                warns=True,
                observed=distance,
                limit=spread,
                unit="nats",
            )
    return lab.findings


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of results, speeds and memory; charts of losses, gradient norm, loss scale and step time."""
    stats = measure_training(
        device,
        steps=FULL_STEPS if full else STEPS,
        budget=FULL_BUDGET if full else BUDGET,
        width=128 if full else 64,
        progress=progress,
    )
    if not stats.runs and not stats.broken:
        raise UsageError(f"no precision could be trained in: {'; '.join(stats.lacking.values())}")
    steps = sum(len(one.steps) for one in stats.runs)
    return Run(
        findings=tuple(check_training(stats)),
        coverage=Coverage(
            {"training steps": steps, "training runs": len(stats.runs)},
            {f"{name}: {why}": 1 for name, why in (*stats.lacking.items(), *stats.broken.items())},
        ),
        tables=loop_views.tables(stats),
        charts=loop_views.charts(stats),
    )
