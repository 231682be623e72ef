"""The judge of a training loop: run its steps plain and instrumented, restore everything, and report what is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count

import torch

from ampcheck.autocast.judge import judge_use
from ampcheck.checks import REGISTRY, added, findings, for_kind
from ampcheck.checks.causes import with_causes
from ampcheck.core.arguments import parse_checks, parse_integer
from ampcheck.core.environment import environment, quiet
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.plan import Plan
from ampcheck.core.progress import SILENT, Listener, Progress
from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict, Where, merge
from ampcheck.core.subject import Kind, as_subject
from ampcheck.outcome.raising import verify
from ampcheck.records.protocol import Act, ProtocolStats, StepError, applied_nonfinite, steps_past_scaler
from ampcheck.records.reductions import Drift
from ampcheck.records.resume import SavedStates
from ampcheck.torchtools.batches import played
from ampcheck.torchtools.dynamo import in_eager_mode
from ampcheck.torchtools.restore import restoring
from ampcheck.torchtools.snapshot import Snapshot
from ampcheck.training.distributed.measure import measure_distributed
from ampcheck.training.distributed.ranks import agreed, earliest, ending_alike, settled, world_size
from ampcheck.training.distributed.replicas import compare_ranks, judge_replicas
from ampcheck.training.distributed.sums import sums_table
from ampcheck.training.gradients import summary as of_gradients
from ampcheck.training.loop import STEPS, TrainingLoop
from ampcheck.training.observed import Observed, check_observed, observe, prevented, unjudged
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.reductions.sums import reduction_table
from ampcheck.training.resume import measure_resume, resume_table
from ampcheck.training.scale import stats as of_scales
from ampcheck.training.stagnation.stagnation import stagnation_tables
from ampcheck.training.state_dtypes.measure import state_dtype_tables
from ampcheck.training.tf32 import settings as of_settings
from ampcheck.training.values import VALUES, with_values

_FOLLOWED = frozenset(VALUES) | {
    *("gradient-underflow", "loss-scale", "scaler-protocol", "stagnation", "reduce-precision", "optimizer-state"),
    *("loss-dtype", "master-weights", "scale-invariance"),
}
"""The checks that compare what steps compute."""

_STATE_CHECKS = ("master-weights", "optimizer-state", "buffer-dtype", "loss-dtype")


@dataclass(slots=True)
class Context:
    """The inputs of every stage, and what earlier stages found.

    start: the state in which the loop was handed over, and in which each stage begins; None where steps cannot run
    again. overflowed: the first step, on any rank, that ended in an infinity or a NaN. drift: where replicas part.
    """

    loop: TrainingLoop
    start: Snapshot | None
    limits: Limits
    wanted: frozenset[str]
    steps: int
    device: str
    seen: Observed = field(default_factory=lambda: Observed(""))  # where ranks lose each other in the first steps
    overflowed: int | None = None
    drift: Drift | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the judgement. checks: those that it judges, none for those of other packages. needs_step: whether the
    first step must have come to its end. repeats: whether it runs steps again, or measures the machine; the others
    judge what was observed."""

    name: str
    checks: tuple[str, ...]
    judge: Callable[[Context], Run]
    needs_step: bool = True
    repeats: bool = False

    def judges(self, wanted: frozenset[str]) -> bool:
        """Return whether it is to run."""
        return not wanted.isdisjoint(self.checks or _added_checks())


def observe_steps(context: Context) -> Run:
    """Run the plain steps, and report those that did not go as a step must."""
    loop, wanted = context.loop, context.wanted
    already_nonfinite = of_gradients.nonfinite_parameters(loop)
    seen = context.seen = observe(loop, context.steps, follow=not wanted.isdisjoint((*_FOLLOWED, *_added_checks())))
    findings = [*check_observed(seen), *judge_finite(context, seen.losses, already_nonfinite)]
    unseen = {f"{name}, which cannot be restored": 1 for name in loop.reached.opaque}
    if loop.reached.unseen:
        unseen["what the step reaches beyond the first 20,000 values"] = 1
    unseen |= seen.unfollowed
    looked = {"steps": seen.steps, "events": len(seen.events), "batches": loop.batches}
    coverage = Coverage({what: number for what, number in looked.items() if number or what != "batches"}, unseen)
    return Run(findings=tuple(findings), coverage=coverage, charts=of_gradients.loss_chart(seen.subject, seen.losses))


def judge_finite(context: Context, losses: Sequence[float], already_nonfinite: tuple[str, ...] = ()) -> list[Finding]:
    """Losses and weights stay finite. already_nonfinite: parameters that were not before the first step."""
    seen = context.seen
    finite = of_gradients.measure_finite(context.loop, losses, already_nonfinite)
    context.overflowed = earliest(finite.overflowed)
    if finite.overflowed is not None:
        made = seen.made(finite.overflowed)
        place, undefined = seen.place(finite.overflowed), made if made in seen.undefined else None
        finite = replace(finite, place=place, undefined=undefined)
    return unjudged(findings(finite, context.limits, context.wanted), seen)


def _gradients(context: Context) -> Run:
    """Gradients compared with float64, and the loss scales that keep them."""
    limits, seen = context.limits, context.seen
    if seen.gradients is None:
        return Run()
    stats = of_gradients.judged_step(seen.gradients, limits)
    skipped = earliest(next((event.step for event in seen.events if event.skipped), None))
    skipped = context.overflowed if skipped is None else skipped
    first_op = seen.place(skipped) if skipped is not None else None
    scales = of_scales.measure_loss_scale(context.loop, stats, seen.events, limits, first_op=first_op)
    judged = [f for scale in scales for f in findings(scale, limits)]
    if stats.skipped:
        why = REGISTRY["loss-scale"].incomplete(stats.subject, f"not judged: {stats.skipped}", hint=stats.hint)
        judged = [why if f.verdict is Verdict.SKIP else f for f in judged]
    views = of_scales.loss_scale_chart, of_scales.window_chart
    return Run(
        findings=(*findings(stats, limits, ("gradient-underflow",)), *judged),
        coverage=stats.coverage,
        tables=(*of_gradients.gradient_table(stats), *chain.from_iterable(map(of_scales.loss_scale_table, scales))),
        charts=tuple(chart for view in views for scale in scales for chart in view(scale)),
    )


def _updates(context: Context) -> Run:
    stats = context.seen.updates
    if stats is None:
        return Run()
    return _run(
        findings(stats, context.limits, ("stagnation",)), coverage=stats.coverage, tables=stagnation_tables(stats)
    )


def _scales(context: Context) -> Run:
    stats = context.seen.scales
    return Run() if stats is None else _run(findings(stats, context.limits))


def _added_checks() -> tuple[str, ...]:
    return added(Kind.TRAINING, Kind.CALL)


def _added(context: Context) -> Run:
    """Return what checks of other packages say of the gradients, the updates and the calls."""
    seen, limits = context.seen, context.limits
    gradients = None if seen.gradients is None else of_gradients.judged_step(seen.gradients, limits)
    records = [record for record in (gradients, seen.updates, _calls(context)) if record is not None]
    names = context.wanted.intersection(_added_checks())
    return _run(finding for record in records for finding in findings(record, limits, names))


def _calls(context: Context) -> ProtocolStats:
    """The record of the calls of the observed steps."""
    seen, gradients, scales = context.seen, context.seen.gradients, context.seen.scales
    return ProtocolStats(
        context.loop.name,
        seen.events,
        seen.steps,
        gradients.lost if gradients else None,
        seen.stopped,
        scales.invariant if scales else None,
        applied=applied_nonfinite(seen.events) or None,
        damage=gradients.damage_text(context.limits) if gradients else "",
        format=gradients.format if gradients else "",
        scalers=tuple(context.loop.scalers),
    )


def _protocol(context: Context) -> Run:
    """The order of calls, as observed, and around a skipped step, which is provoked where schedulers depend on one."""
    seen, stats = context.seen, _calls(context)
    of_schedulers = "scheduler-skip" in context.wanted
    scheduled = of_schedulers and any(event.act is Act.SCHEDULER_STEP for event in seen.events)
    scaler_steps = [event for event in seen.events if event.act is Act.SCALER_STEP]
    skipped = any(event.skipped for event in scaler_steps)
    scaled = any(event.enabled for event in scaler_steps)
    direct = steps_past_scaler(seen.events) and not stats.applied
    skipping = stats
    if context.start is not None and agreed(direct or (scheduled and scaled and not skipped)):
        checked = any(e.act in (Act.UNSCALE, Act.SCALER_STEP) and e.enabled for e in seen.events)
        trial = _overflowing(context.loop, seen.steps, after_backward=not checked)
        if scheduled and not skipped:
            skipping = replace(stats, events=tuple(trial.events), injected=trial.overflowed)
        if direct and trial.overflowed is not None:
            stats = replace(stats, applied=applied_nonfinite(trial.events), injected=trial.overflowed)
    judged = findings(stats, context.limits, ("scaler-protocol",))
    return _run([*judged, *(findings(skipping, context.limits, ("scheduler-skip",)) if of_schedulers else ())])


def _overflowing(loop: TrainingLoop, steps: int, *, after_backward: bool) -> Recorder:
    """The steps up to the one after a gradient was made infinite. after_backward: where no scaler looks at it."""
    recorder = Recorder(loop, overflow_from=min(1, steps - 1), after_backward=after_backward)
    with in_eager_mode(), recorder.listening():
        for taken in recorder.run(steps):
            over = recorder.overflowed
            if isinstance(taken, StepError) or agreed(over is not None and recorder.step > over):
                break
    return recorder


def _resuming(context: Context) -> Run:
    limits, saved = context.limits, SavedStates(context.loop.name, context.seen.events)
    assert context.start is not None
    stats = measure_resume(context.loop, context.start)
    return _run([*findings(saved, limits), *findings(stats, limits)], tables=resume_table(stats))


def _replicas(context: Context) -> Run:
    """Check that what ranks hold alike stays alike."""
    seen = context.seen
    context.drift, coverage = compare_ranks(seen.replicas)
    return _run(judge_replicas(seen.subject, context.drift, seen.events), coverage=coverage)


def _reductions(context: Context) -> Run:
    """Sums and norms of this process, or of all ranks together."""
    loop = context.loop
    if world_size() > 1:
        ranks = measure_distributed(loop, world_size=loop.shape.get("world_size"))
        return _run(findings(replace(ranks, drift=context.drift), context.limits), sums_table(ranks), ranks.coverage)
    stats = context.seen.sums
    if stats is None:
        return Run()
    return _run(findings(stats, context.limits), reduction_table(stats))


def _state_dtypes(context: Context) -> Run:
    seen = context.seen
    if seen.residency is None:
        return Run()
    passes = [event for event in seen.events if event.act is Act.BACKWARD and event.dtype]
    narrow = (event.where for event in passes if event.computed or event.dtype in ("float16", "bfloat16"))
    stats = replace(
        seen.residency,
        losses=tuple(event.dtype for event in passes),
        computed=tuple(dict.fromkeys(dtype for event in passes for dtype in event.computed)),
        loss_at=next(narrow, Where("backward")),
        returned=seen.losses,
        exact=seen.exact,
        place=seen.place(next((number for number, loss in enumerate(seen.losses) if not math.isfinite(loss)), 0)),
    )
    return _run(findings(stats, context.limits, context.wanted), tables=state_dtype_tables(stats))


def _confounders(context: Context) -> Run:
    stats = of_settings.measure_confounders(torch.device(context.device))
    return _run(findings(stats, context.limits, ("tf32",)), tables=(of_settings.confounders_table(stats),))


def _run(findings: Iterable[Finding], tables: tuple[Table, ...] = (), coverage: Coverage | None = None) -> Run:
    return Run(findings=tuple(findings), tables=tables, coverage=coverage or Coverage())


STAGES = (
    Stage("gradients", ("gradient-underflow", "loss-scale", "scaler-protocol"), _gradients),
    Stage("updates", ("stagnation",), _updates),
    Stage("loss scales", ("scale-invariance",), _scales),
    Stage("a skipped step", ("scaler-protocol", "scheduler-skip"), _protocol, needs_step=False),
    Stage("resuming", ("resume",), _resuming, repeats=True),
    Stage("replicas", ("reduce-precision", "scaler-protocol"), _replicas),
    Stage("reductions", ("reduce-precision",), _reductions, repeats=True),
    Stage("state dtypes", _STATE_CHECKS, _state_dtypes, needs_step=False),
    Stage("confounders", ("tf32",), _confounders, needs_step=False, repeats=True),
    Stage("checks of other packages", (), _added, needs_step=False),
)
"""In their order: later stages use the results of earlier ones."""

_OF_STEPS = ("overflow", "nonfinite-reference", "nonfinite-gradient")
CHECKS = tuple(dict.fromkeys((*_OF_STEPS, *(slug for stage in STAGES for slug in stage.checks))))
"""Checks of a training loop, besides those of its use of autocast."""


def judge_training(plan: Plan, listener: Listener = SILENT) -> Run:
    """Judge a training loop. Model, optimizer, scaler and the rest are restored, also after an error.

    The plan names checks of a training loop; its steps are by default the subject's `steps` or 24, its horizon is by
    default that of the subject. Every run begins from the state in which the loop was handed over.
    """
    subject, count = plan.subject, plan.steps
    if count is not None:
        parse_integer(count, "steps")
    count = count or subject.shape.get("steps") or STEPS
    loop = TrainingLoop(played(subject, parse_integer(count, f"steps of {subject.name}")))
    loop.settled = settled
    loop.horizon = plan.horizon or loop.horizon
    wanted = frozenset(slug for slug in (*CHECKS, *VALUES, *_added_checks()) if plan.judges(slug))
    with loop.preserved() as start:
        device = plan.device if torch.device(plan.device).type != "cpu" else loop.device_type
        context = Context(loop, start, plan.limits, wanted, count, device)
        runs: list[Run] = []
        with ending_alike(runs, loop.name, wanted):
            for run in _runs(context, plan, listener.progress):
                runs.append(run)
                listener.judged(run)
    merged = plan.only(with_values(merge(runs), context.seen.values, plan, finished=context.seen.steps > 0))
    title = f"audit of {loop.name}"
    return replace(merged, findings=with_causes(merged.findings), environment=environment(device), title=title)


@restoring
def assert_training(
    subject: object,
    *,
    device: str | None = None,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    name: str = "",
    steps: int | None = None,
) -> Run:
    """Assert that a training loop learns and loses nothing to low precision.

    subject: `{"model": ..., "optimizer": ..., "scaler": ..., "step": step}` with `step(i) -> float`, or a `Subject` of
    that kind. device: where its float32 products are probed, by default the device of the parameters. checks: slugs,
    all by default. name: what findings call it. steps: how many are observed, by default the `steps` of the mapping or
    24. Returns the run; raises `AssertionError` with every failure, and `UsageError` for another subject or check.
    """
    __tracebackhide__ = True
    loop = as_subject(subject)
    if loop.kind is not Kind.TRAINING:
        raise UsageError(f"{loop.name} is of kind '{loop.kind.value}'; a training loop is a mapping with 'step'")
    slugs = parse_checks(checks, for_kind(Kind.TRAINING))
    loop = replace(loop, name=name or loop.name)
    return verify(judge_training(Plan.of(loop, limits, checks=slugs, steps=steps, device=device or "cpu")))


def _runs(context: Context, plan: Plan, progress: Progress) -> Iterator[Run]:
    """The run of each stage that judges a wanted check."""
    loop, start = context.loop, context.start
    assert start is not None
    stages = [s for s in STAGES if not loop.empty and s.judges(context.wanted)]
    done = count()

    def report(stage: str) -> None:
        progress(f"{loop.name}: {stage}", next(done), len(stages) + 2)

    report("plain steps")
    yield observe_steps(context)
    stopped = context.seen.stopped
    fatal = agreed(stopped is not None and context.seen.steps == 0)
    for stage in stages:
        report(stage.name)
        start.restore()
        if fatal and stage.needs_step:
            yield Run(findings=tuple(prevented(context.seen, context.loop, stage.checks)))
            continue
        with quiet():
            run = stage.judge(context)
        yield replace(run, findings=tuple(unjudged(run.findings, context.seen)))
    start.restore()
    report("use of autocast")
    if not fatal and (plan.checks is None or set(plan.checks) - {*CHECKS, *VALUES, *_added_checks(), "coverage"}):
        with quiet():
            run = judge_use(loop.subject, plan.checks)
        if stopped is not None:  # reported already, with its step and line
            run = replace(run, findings=tuple(f for f in run.findings if f.check != "coverage"))
        yield run
    report("done")
