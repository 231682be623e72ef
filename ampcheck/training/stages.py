"""The stages of the judgement of a training loop: each takes frozen inputs and returns a run and its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from ampcheck.catalog import numerics as of_models
from ampcheck.catalog import training as of_loops
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict
from ampcheck.torchtools.snapshot import Snapshot
from ampcheck.training.checkpoints import check_checkpoint_events
from ampcheck.training.distributed.checks import check_distributed, distributed_tables
from ampcheck.training.distributed.measure import measure_distributed
from ampcheck.training.distributed.ranks import agreed, gather, world_size
from ampcheck.training.gradients.checks import check_gradients, damage_text, gradient_table
from ampcheck.training.gradients.finite import (
    check_finite,
    check_loss,
    loss_stats,
    measure_finite,
    nonfinite_parameters,
)
from ampcheck.training.gradients.invariance import check_invariance, measure_invariance
from ampcheck.training.loop import StepError, TrainingLoop
from ampcheck.training.observed import Observed, check_observed, loss_chart, observe, unjudged
from ampcheck.training.protocol.checks import (
    applied_nonfinite,
    check_protocol,
    check_scheduler_skip,
    steps_past_scaler,
)
from ampcheck.training.protocol.events import Act, ProtocolStats
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.reductions.checks import check_reductions, reduction_table
from ampcheck.training.resume import check_resume, measure_resume, resume_table
from ampcheck.training.scale.checks import check_loss_scale
from ampcheck.training.scale.measure import first_skipped, measure_loss_scale
from ampcheck.training.scale.report import loss_scale_chart, loss_scale_table, window_chart
from ampcheck.training.stagnation.checks import check_stagnation
from ampcheck.training.stagnation.measure import stagnation_tables
from ampcheck.training.state_dtypes.checks import check_state_dtypes
from ampcheck.training.state_dtypes.measure import state_dtype_tables
from ampcheck.training.tf32.settings import (
    check_tf32,
    confounders_table,
    measure_confounders,
    measure_nondeterminism,
)

_FOLLOWED = frozenset(
    str(check)
    for check in (
        *(of_loops.GRADIENT_UNDERFLOW, of_loops.LOSS_SCALE, of_loops.SCALER_PROTOCOL, of_loops.STAGNATION),
        *(of_loops.REDUCE_PRECISION, of_models.OVERFLOW, of_models.LOSS_DTYPE),
    )
)
"""The checks that compare what steps compute."""


@dataclass(frozen=True, slots=True)
class Context:
    """The inputs of every stage. start: the state in which the loop was handed over, and in which each stage begins."""

    loop: TrainingLoop
    start: Snapshot
    limits: Limits
    wanted: frozenset[str]
    steps: int
    device: str


@dataclass(frozen=True, slots=True)
class Results:
    """What later stages use of earlier ones.

    overflowed: the first step, on any rank, that ended in an infinity or a NaN. lost, format, damage: of the gradients.
    invariant: whether the loop is invariant to the loss scale.
    """

    observed: Observed
    overflowed: int | None = None
    lost: float | None = None
    format: str = ""
    damage: str = ""
    invariant: bool | None = None


Outcome: TypeAlias = tuple[Run, Results]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the judgement. needs_step: whether the first step must have come to its end."""

    name: str
    checks: tuple[Check, ...]
    judge: Callable[[Context, Results], Outcome]
    needs_step: bool = True


def observe_steps(context: Context) -> Outcome:
    """Run the plain steps, and report those that did not go as a step must."""
    loop, wanted = context.loop, context.wanted
    already_nonfinite = nonfinite_parameters(loop)
    seen = observe(loop, context.steps, follow=not _FOLLOWED.isdisjoint(wanted))
    finite = measure_finite(loop, seen.losses, already_nonfinite)
    overflowed = min((step for step in gather(finite.overflowed) if step is not None), default=None)
    if finite.overflowed is not None:
        finite = replace(finite, place=seen.place(finite.overflowed))
    findings = [*check_observed(seen), *unjudged([f for f in check_finite(finite) if f.check in wanted], seen)]
    unseen = {f"{name}, which cannot be restored": 1 for name in loop.reached.opaque}
    if loop.reached.unseen:
        unseen["what the step reaches beyond the first 20,000 values"] = 1
    coverage = Coverage({"steps": seen.steps, "events": len(seen.events)}, unseen)
    run = Run(findings=tuple(findings), coverage=coverage, charts=loss_chart(seen))
    return run, Results(seen, overflowed)


def _gradients(context: Context, results: Results) -> Outcome:
    """Gradients compared with float64, and the loss scales that keep them."""
    loop, limits, seen = context.loop, context.limits, results.observed
    stats = seen.gradients
    if stats is None:
        return Run(), results
    skipped = first_skipped(seen.events)
    skipped = results.overflowed if skipped is None else skipped
    first_op = seen.place(skipped) if skipped is not None else None
    scales = measure_loss_scale(loop, stats, seen.events, limits, first_op=first_op)
    damage = damage_text(stats, limits)
    judged = [f for scale in scales for f in check_loss_scale(replace(scale, damage=damage), limits)]
    if stats.skipped:
        why = f"not judged: {stats.skipped}"
        verdict = Verdict.INCOMPLETE if stats.prevented else Verdict.SKIP
        judged = [
            replace(f, verdict=verdict, message=why, hint=stats.hint) if f.verdict is Verdict.SKIP else f
            for f in judged
        ]
    tables = [gradient_table(stats), *map(loss_scale_table, scales)]
    charts = [*map(loss_scale_chart, scales), *map(window_chart, scales)]
    run = Run(
        findings=(*check_gradients(stats, limits), *judged),
        coverage=stats.coverage,
        tables=tuple(table for table in tables if table is not None),
        charts=tuple(chart for chart in charts if chart is not None),
    )
    return run, replace(results, lost=stats.lost, format=stats.format, damage=damage)


def _updates(context: Context, results: Results) -> Outcome:
    stats = results.observed.updates
    if stats is None:
        return Run(), results
    run = _run(check_stagnation(stats, context.limits), coverage=stats.coverage, tables=stagnation_tables(stats))
    return run, results


def _scales(context: Context, results: Results) -> Outcome:
    stats = measure_invariance(context.loop)
    return _run(check_invariance(stats)), replace(results, invariant=stats.invariant)


def _protocol(context: Context, results: Results) -> Outcome:
    """The order of calls, as observed; and the effects of a skipped step, which is provoked if none was observed."""
    seen = results.observed
    stats = ProtocolStats(
        context.loop.name,
        seen.events,
        seen.steps,
        results.lost,
        seen.stopped,
        results.invariant,
        applied=applied_nonfinite(seen.events) or None,
        damage=results.damage,
        format=results.format,
        scalers=tuple(path for path, scaler in context.loop.reached.scalers.items() if scaler.is_enabled()),
    )
    of_schedulers = of_loops.SCHEDULER_SKIP.slug in context.wanted
    scheduled = of_schedulers and any(event.act is Act.SCHEDULER_STEP for event in seen.events)
    scaler_steps = [event for event in seen.events if event.act is Act.SCALER_STEP]
    skipped = any(event.skipped for event in scaler_steps)
    scaled = any(event.enabled for event in scaler_steps)
    direct = steps_past_scaler(seen.events) and not stats.applied
    skipping = stats
    if agreed(direct or (scheduled and not skipped and scaled)):
        checked = any(e.act in (Act.UNSCALE, Act.SCALER_STEP) and e.enabled for e in seen.events)
        recorder = _overflowing(context.loop, seen.steps, after_backward=not checked)
        if scheduled and not skipped:
            skipping = replace(stats, events=tuple(recorder.events), injected=recorder.overflowed)
        if direct and recorder.overflowed is not None:
            stats = replace(stats, applied=applied_nonfinite(recorder.events), injected=recorder.overflowed)
    findings = check_protocol(stats, context.limits)
    return _run([*findings, *(check_scheduler_skip(skipping) if of_schedulers else ())]), results


def _overflowing(loop: TrainingLoop, steps: int, *, after_backward: bool) -> Recorder:
    """The steps up to the one after a gradient was made infinite. after_backward: where no scaler looks at it."""
    recorder = Recorder(loop, overflow_from=min(1, steps - 1), after_backward=after_backward)
    with recorder.listening():
        for recorder.step in range(steps):
            taken = loop.take(recorder.step)
            recorder.forget_graphs()
            over = recorder.overflowed
            if isinstance(taken, StepError) or agreed(over is not None and recorder.step > over):
                break
    return recorder


def _resuming(context: Context, results: Results) -> Outcome:
    events = check_checkpoint_events(results.observed.events, context.loop.name)
    stats = measure_resume(context.loop)
    return _run([*events, *check_resume(stats)], tables=resume_table(stats)), results


def _reductions(context: Context, results: Results) -> Outcome:
    """Sums and norms of this process, or of all ranks together."""
    loop = context.loop
    if world_size() > 1:
        ranks = measure_distributed(loop, world_size=loop.shape.get("world_size"))
        findings, tables = check_distributed(ranks, context.limits), tuple(distributed_tables(ranks))
        return _run(findings, coverage=ranks.coverage, tables=tables), results
    stats = results.observed.sums
    if stats is None:
        return Run(), results
    table = reduction_table(stats)
    return _run(check_reductions(stats, context.limits), tables=(table,) if table else ()), results


def _state_dtypes(context: Context, results: Results) -> Outcome:
    seen = results.observed
    if seen.residency is None:
        return Run(), results
    passes = [event for event in seen.events if event.act is Act.BACKWARD and event.dtype]
    computed = tuple(dict.fromkeys(dtype for event in passes for dtype in event.computed))
    findings = check_state_dtypes(seen.residency, tuple(event.dtype for event in passes), computed)
    if of_models.LOSS_DTYPE.slug in context.wanted:
        first = next((number for number, loss in enumerate(seen.losses) if not math.isfinite(loss)), 0)
        nonfinite = check_loss(loss_stats(seen.subject, seen.losses, seen.exact, seen.place(first)))
        if nonfinite:
            findings = [*(f for f in findings if f.check != of_models.LOSS_DTYPE.slug), *nonfinite]
    return _run(findings, tables=state_dtype_tables(seen.residency)), results


def _confounders(context: Context, results: Results) -> Outcome:
    loop = context.loop
    stats = measure_confounders(torch.device(context.device))
    if results.observed.steps and not loop.reached.compiled:  # a compiled step would be compiled once more
        stats = replace(stats, nondeterministic=measure_nondeterminism(lambda: loop.take(0)))
    return _run(check_tf32(stats, context.limits), tables=(confounders_table(stats),)), results


def _run(findings: Iterable[Finding], tables: tuple[Table, ...] = (), coverage: Coverage | None = None) -> Run:
    return Run(findings=tuple(findings), tables=tables, coverage=coverage or Coverage())


_STATE_CHECKS = (of_loops.MASTER_WEIGHTS, of_loops.OPTIMIZER_STATE, of_loops.BUFFER_DTYPE, of_models.LOSS_DTYPE)

STAGES = (
    Stage("gradients", (of_loops.GRADIENT_UNDERFLOW, of_loops.LOSS_SCALE, of_loops.SCALER_PROTOCOL), _gradients),
    Stage("updates", (of_loops.STAGNATION,), _updates),
    Stage("loss scales", (of_loops.SCALE_INVARIANCE, of_loops.SCALER_PROTOCOL), _scales),
    Stage("a skipped step", (of_loops.SCALER_PROTOCOL, of_loops.SCHEDULER_SKIP), _protocol, needs_step=False),
    Stage("resuming", (of_loops.RESUME,), _resuming),
    Stage("reductions", (of_loops.REDUCE_PRECISION,), _reductions),
    Stage("state dtypes", _STATE_CHECKS, _state_dtypes, needs_step=False),
    Stage("confounders", (of_loops.TF32,), _confounders, needs_step=False),
)
"""In their order: later stages use the results of earlier ones."""

_CHECKS = dict.fromkeys(
    (of_models.OVERFLOW, of_models.NONFINITE_GRADIENT, *(check for stage in STAGES for check in stage.checks))
)
CHECKS = tuple(check.slug for check in _CHECKS)
"""What is judged of a training loop, besides its use of autocast."""
