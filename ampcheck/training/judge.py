"""The judge of a training loop: run it under every eye, put everything back, and say what is lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ampcheck.autocast.judge import judge_use
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits, load_settings
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where, merge, verify
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.torchtools.restore import restoring
from ampcheck.training.distributed.checks import check_distributed, distributed_tables
from ampcheck.training.distributed.measure import measure_distributed
from ampcheck.training.distributed.ranks import agreed, ending_alike, gather, settled, world_size
from ampcheck.training.gradients.checks import check_gradients, damage_text, gradient_table
from ampcheck.training.gradients.finite import (
    check_finite,
    check_loss,
    measure_finite,
    measure_loss,
    nonfinite_parameters,
    nonfinite_place,
)
from ampcheck.training.gradients.invariance import check_invariance, measure_invariance
from ampcheck.training.gradients.underflow import measure_gradients, quiet
from ampcheck.training.loop import Snapshot, StepError, TrainingLoop
from ampcheck.training.observed import Observed, check_observed, loss_chart, observe, unjudged
from ampcheck.training.protocol.checks import (
    applied_nonfinite,
    check_protocol,
    check_scheduler_skip,
    steps_past_scaler,
)
from ampcheck.training.protocol.events import Act, ProtocolStats
from ampcheck.training.protocol.recorder import Recorder
from ampcheck.training.reductions.checks import check_reductions, measure_reductions, reduction_table
from ampcheck.training.resume.checks import check_checkpoint_events, check_resume, measure_resume, resume_table
from ampcheck.training.scale.checks import check_loss_scale
from ampcheck.training.scale.measure import first_skipped, measure_loss_scale
from ampcheck.training.scale.report import loss_scale_chart, loss_scale_table, window_chart
from ampcheck.training.stagnation.checks import check_stagnation
from ampcheck.training.stagnation.measure import measure_stagnation, stagnation_tables
from ampcheck.training.state_dtypes.checks import check_state_dtypes
from ampcheck.training.state_dtypes.measure import state_dtype_tables
from ampcheck.training.tf32.settings import (
    check_tf32,
    confounders_table,
    measure_confounders,
    measure_nondeterminism,
)

CHECKS = (
    "overflow",
    "nonfinite-gradient",
    "gradient-underflow",
    "loss-scale",
    "scaler-protocol",
    "scheduler-skip",
    "scale-invariance",
    "resume",
    "stagnation",
    "master-weights",
    "optimizer-state",
    "buffer-dtype",
    "loss-dtype",
    "reduce-precision",
    "tf32",
)
"""What is judged of a training loop, besides its use of autocast."""

_RESIDENCY = ("master-weights", "optimizer-state", "buffer-dtype", "loss-dtype")

STEPS = 24
"""How many steps are observed as they are. A scaler that starts at 65536 needs up to 16 to find its place."""

UPDATES = 4
"""How many steps are followed update by update."""


def judge_training(
    subject: Subject,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    *,
    steps: int | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Run:
    """Judge a training loop. Model, optimizer, scaler and the rest are afterwards as they were, also after an error.

    checks: of `CHECKS` and those of the guards, all by default. steps: how many are observed as they are, by default
    the subject's `steps` or 24. Every run begins from the state that the loop was handed over in.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise UsageError(f"steps must be a whole number, 1 or more; found {steps!r}")
    loop = TrainingLoop(subject)
    loop.settled = settled
    bounds = (limits or load_settings().limits).with_(subject.limits, f"the subject {subject.name}")
    wanted = set(CHECKS if checks is None else [slug for slug in CHECKS if slug in checks])
    with loop.preserved() as start:
        device = device if torch.device(device).type != "cpu" else loop.device_type
        judge = _Judge(loop, start, bounds, wanted, steps or loop.shape.get("steps") or STEPS, device)
        runs: list[Run] = []
        with ending_alike(runs, loop.name, wanted):
            judge.add_to(runs, checks, progress)
    kept = [replace(run, findings=tuple(f for f in run.findings if _kept(f, checks))) for run in runs]
    return replace(merge(kept), environment=environment(device), title=f"audit of {loop.name}")


def _kept(finding: Finding, checks: Collection[str] | None) -> bool:
    return checks is None or finding.check in checks or finding.check == "coverage"


@restoring
def assert_training(
    subject: Any, *, checks: Collection[str] | None = None, limits: Limits | None = None, steps: int | None = None
) -> Run:
    """Assert that a training loop learns and loses nothing to low precision.

    subject: `{"model": ..., "optimizer": ..., "scaler": ..., "step": step}` with `step(i) -> float`, or a `Subject` of
    that kind. checks: slugs, all by default. Returns the run; raises `AssertionError` with every failure, and
    `UsageError` for another subject or check.
    """
    __tracebackhide__ = True
    made = as_subject(subject)
    if made.kind is not Kind.TRAINING:
        raise UsageError(f"{made.name} is of kind '{made.kind.value}'; a training loop is a mapping with 'step'")
    known = dict.fromkeys(CHECKS)
    if unknown := sorted(set(checks or ()) - set(known)):
        raise UsageError(f"there is no check {unknown[0]!r} of a training loop; there are {', '.join(known)}")
    return verify(judge_training(made, checks, limits, steps=steps))


class _Judge:
    """The stages of one judgement, in their order; each begins from `start`."""

    def __init__(
        self, loop: TrainingLoop, start: Snapshot, limits: Limits, wanted: set[str], steps: int, device: str
    ) -> None:
        self.loop, self.start, self.limits, self.wanted, self.steps = loop, start, limits, wanted, steps
        self.device = device
        self.observed = Observed(loop.name)
        self.lost: float | None = None
        self.damage = ""
        self.overflowed: int | None = None
        self.places: dict[int, Where | None] = {}
        self.format = ""
        self.invariant: bool | None = None

    def add_to(self, runs: list[Run], checks: Collection[str] | None, tell: Progress) -> None:
        """Add the run of every stage that something was asked of."""
        stages: list[tuple[str, tuple[str, ...], Callable[[], Run]]] = [
            ("gradients", ("gradient-underflow", "loss-scale", "scaler-protocol"), self._gradients),
            ("updates", ("stagnation",), self._updates),
            ("loss scales", ("scale-invariance", "scaler-protocol"), self._scales),
            ("a skipped step", ("scaler-protocol", "scheduler-skip"), self._protocol),
            ("resuming", ("resume",), self._resuming),
            ("reductions", ("reduce-precision",), self._reductions),
            ("what lives across steps", _RESIDENCY, self._live),
            ("confounders", ("tf32",), self._confounders),
        ]
        stages = [stage for stage in stages if self.wanted & set(stage[1]) and not self.loop.empty]
        tell(f"{self.loop.name}: steps as they are", 0, len(stages) + 2)
        runs.append(self._observe())
        fatal = agreed(self.observed.stopped is not None and self.observed.steps == 0)
        for number, (name, slugs, stage) in enumerate(stages, 1):
            tell(f"{self.loop.name}: {name}", number, len(stages) + 2)
            self.start.restore()
            if fatal and stage not in (self._protocol, self._live, self._confounders):
                text = "not judged: the first step did not come to its end, see coverage"
                left = [slug for slug in slugs if slug != "scaler-protocol"]
                hint = "mend the step that coverage names, so that step(0) returns its loss"
                subject = self.loop.name
                runs.append(self._run([Finding(s, self._prevented(s), subject, text, hint=hint) for s in left]))
                continue
            with quiet():
                run = stage()
            runs.append(replace(run, findings=tuple(unjudged(run.findings, self.observed))))
        self.start.restore()
        tell(f"{self.loop.name}: use of autocast", len(stages) + 1, len(stages) + 2)
        if not fatal and (checks is None or set(checks) - set(CHECKS)):
            with quiet():
                use = judge_use(self.loop.subject, checks)
            if self.observed.stopped is not None:  # it has been told, with its step and line
                use = replace(use, findings=tuple(f for f in use.findings if f.check != "coverage"))
            runs.append(use)
        tell(f"{self.loop.name}: done", len(stages) + 2, len(stages) + 2)

    def _prevented(self, slug: str) -> Verdict:
        """Of what a first step that did not end leaves unjudged. Where memory was short, it is for want of that."""
        stopped, scalers = self.observed.stopped, self.loop.reached.scalers.values()
        memory = stopped is not None and stopped.kind == "memory"
        aside = (slug == "resume" and self.loop.save is None) or (
            slug == "scale-invariance" and not any(scaler.is_enabled() for scaler in scalers)
        )
        return Verdict.SKIP if memory or aside else Verdict.INCOMPLETE

    def _run(self, findings: Sequence[Finding], coverage: Coverage | None = None, **evidence: Any) -> Run:
        return Run(findings=tuple(findings), coverage=coverage or Coverage(), **evidence)

    def _observe(self) -> Run:
        """Run the steps as they are, and tell what did not go as a step must."""
        unwell = nonfinite_parameters(self.loop)
        self.observed = seen = observe(self.loop, self.steps, restarts="stagnation" in self.wanted)
        finite = measure_finite(self.loop, seen.losses, unwell)
        self.overflowed = min((step for step in gather(finite.overflowed) if step is not None), default=None)
        if "overflow" in self.wanted and self.overflowed is not None:
            place = self._place(self.overflowed)  # all ranks run that step again
            finite = replace(finite, place=place if finite.overflowed == self.overflowed else None)
        finite_ones = [f for f in check_finite(finite) if f.check in self.wanted]
        told = [*check_observed(seen), *unjudged(finite_ones, seen)]
        reached = self.loop.reached
        unseen = {f"{name}, which goes on as it is and is not put back": 1 for name in reached.opaque}
        if reached.unseen:
            unseen["what the step reaches beyond the first 20,000 values"] = 1
        coverage = Coverage({"steps": seen.steps, "events": len(seen.events)}, unseen)
        return self._run(told, coverage, charts=loss_chart(seen))

    def _place(self, step: int) -> Where | None:
        """The op in which a step first makes an infinity or a NaN. All ranks must ask for the same step."""
        if step not in self.places:
            self.places[step] = nonfinite_place(self.loop, self.start, step)
        return self.places[step]

    def _gradients(self) -> Run:
        """Gradients beside float64, and the loss scales that serve."""
        number = max(gather(self.observed.settled))  # all ranks run the same step
        before = self.observed.losses[number] if number < len(self.observed.losses) else None
        outputs = not self.loop.reached.compiled
        first = None
        if "loss-scale" in self.wanted:
            skipped = first_skipped(self.observed.events)
            skipped = self.overflowed if skipped is None else skipped
            first = None if skipped is None else self._place(skipped)
        self.start.restore()
        stats, shadow = measure_gradients(self.loop, number, observed=before, outputs=outputs)
        self.lost, self.format = stats.lost, stats.format
        if world_size() > 1:
            shadow = None  # how often it runs depends on what this rank sees
        scales = measure_loss_scale(self.loop, stats, shadow, self.observed.events, self.limits, first_op=first)
        self.damage = damage_text(stats, self.limits)
        judged = [f for one in scales for f in check_loss_scale(replace(one, damage=self.damage), self.limits)]
        if stats.skipped:
            why = f"not judged: {stats.skipped}"
            verdict = Verdict.INCOMPLETE if stats.prevented else Verdict.SKIP
            skips = Verdict.SKIP
            judged = [
                replace(f, verdict=verdict, message=why, hint=stats.hint) if f.verdict is skips else f for f in judged
            ]
        found = [*check_gradients(stats, self.limits), *judged]
        tables = [gradient_table(stats), *map(loss_scale_table, scales)]
        charts = [*map(loss_scale_chart, scales), *map(window_chart, scales)]
        return self._run(
            found,
            stats.coverage,
            tables=tuple(table for table in tables if table is not None),
            charts=tuple(chart for chart in charts if chart is not None),
        )

    def _updates(self) -> Run:
        stats = measure_stagnation(self.loop, UPDATES)
        anew = self.observed.restarted
        told = (replace(one, accumulation=None) if one.name in anew else one for one in stats.tensors)
        stats = replace(stats, tensors=tuple(told))
        self.observed.moved = any(one.moved for one in stats.tensors)
        found = check_stagnation(stats, self.limits)
        return self._run(found, stats.coverage, tables=stagnation_tables(stats))

    def _scales(self) -> Run:
        stats = measure_invariance(self.loop)
        self.invariant = stats.invariant
        return self._run(check_invariance(stats))

    def _protocol(self) -> Run:
        """The order of calls, as observed; and what a skipped step does, which is made if none came by itself."""
        seen = self.observed
        stats = ProtocolStats(
            self.loop.name,
            tuple(seen.events),
            seen.steps,
            self.lost,
            seen.stopped,
            self.invariant,
            applied=applied_nonfinite(seen.events) or None,
            damage=self.damage,
            format=self.format,
            scalers=tuple(path for path, one in self.loop.reached.scalers.items() if one.is_enabled()),
        )
        scheduled = "scheduler-skip" in self.wanted and any(e.act is Act.SCHEDULER_STEP for e in seen.events)
        skipped = any(event.act is Act.SCALER_STEP and event.skipped for event in seen.events)
        scaled = any(event.act is Act.SCALER_STEP and event.enabled for event in seen.events)
        direct = steps_past_scaler(seen.events) and not stats.applied
        skipping = stats
        if agreed(direct or (scheduled and not skipped and scaled)):
            looked_at = any(e.act in (Act.UNSCALE, Act.SCALER_STEP) and e.enabled for e in seen.events)
            recorder = self._overflowing(after_backward=not looked_at)
            if scheduled and not skipped:
                skipping = replace(stats, events=tuple(recorder.events), injected=recorder.overflowed)
            if direct and recorder.overflowed is not None:
                stats = replace(stats, applied=applied_nonfinite(recorder.events), injected=recorder.overflowed)
        found = check_protocol(stats, self.limits)
        return self._run(found if "scheduler-skip" not in self.wanted else [*found, *check_scheduler_skip(skipping)])

    def _overflowing(self, *, after_backward: bool) -> Recorder:
        """The steps up to the one after a gradient was made infinite. after_backward: where no scaler looks at it."""
        start = min(1, self.observed.steps - 1)
        recorder = Recorder(self.loop, overflow_from=start, after_backward=after_backward)
        with recorder.listening():
            for recorder.step in range(self.observed.steps):
                taken = self.loop.take(recorder.step)
                recorder.forget_graphs()
                over = recorder.overflowed
                if isinstance(taken, StepError) or agreed(over is not None and recorder.step > over):
                    break
        return recorder

    def _resuming(self) -> Run:
        events = check_checkpoint_events(self.observed.events, self.loop.name)
        stats = measure_resume(self.loop)
        return self._run([*events, *check_resume(stats)], tables=resume_table(stats))

    def _reductions(self) -> Run:
        """Sums and norms of this process, or of all ranks together."""
        if world_size() > 1:
            ranks = measure_distributed(self.loop, world_size=self.loop.shape.get("world_size"))
            found = check_distributed(ranks, self.limits)
            return self._run(found, ranks.coverage, tables=tuple(distributed_tables(ranks)))
        stats = measure_reductions(lambda: [self.loop.take(number) for number in range(2)], self.loop.name)
        table = reduction_table(stats)
        return self._run(check_reductions(stats, self.limits), tables=(table,) if table else ())

    def _live(self) -> Run:
        residency = self.observed.residency
        if residency is None:
            return self._run([])
        passes = [e for e in self.observed.events if e.act is Act.BACKWARD and e.dtype]
        computed = tuple(dict.fromkeys(dtype for event in passes for dtype in event.computed))
        found = check_state_dtypes(residency, tuple(event.dtype for event in passes), computed)
        if "loss-dtype" in self.wanted and (
            wrong := check_loss(measure_loss(self.loop, self.start, self.observed.losses))
        ):
            found = [*(one for one in found if one.check != "loss-dtype"), *wrong]
        return self._run(found, tables=state_dtype_tables(residency))

    def _confounders(self) -> Run:
        stats = measure_confounders(torch.device(self.device))
        if self.observed.steps and not self.loop.reached.compiled:  # a compiled step would be compiled once more
            stats = replace(stats, nondeterministic=measure_nondeterminism(lambda: self.loop.take(0)))
        return self._run(check_tf32(stats, self.limits), tables=(confounders_table(stats),))
