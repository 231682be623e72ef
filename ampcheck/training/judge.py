"""The judge of a training loop: run its steps plain and instrumented, restore everything, and report what is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import count

import torch

from ampcheck.autocast.judge import judge_use
from ampcheck.catalog import for_kind
from ampcheck.catalog.training import RESUME, SCALE_INVARIANCE, SCALER_PROTOCOL
from ampcheck.core.arguments import parse_integer, parse_names
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits, resolve_limits
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Run, Verdict, merge, verify
from ampcheck.core.subject import Kind, Subject, as_subject
from ampcheck.torchtools.restore import restoring
from ampcheck.training.distributed.ranks import agreed, ending_alike, settled
from ampcheck.training.loop import TrainingLoop, quiet
from ampcheck.training.observed import unjudged
from ampcheck.training.stages import CHECKS, STAGES, Context, Stage, observe_steps

__all__ = ["CHECKS", "STEPS", "assert_training", "judge_training"]

STEPS = 24
"""How many steps are observed. A scaler that starts at 65536 needs up to 16 to find its scale."""


def judge_training(
    subject: Subject,
    checks: Collection[str] | None = None,
    limits: Limits | None = None,
    *,
    steps: int | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Run:
    """Judge a training loop. Model, optimizer, scaler and the rest are restored, also after an error.

    checks: those of a training loop, all by default. steps: how many are observed, by default the subject's `steps` or
    24. Every run begins from the state in which the loop was handed over.
    """
    if steps is not None:
        parse_integer(steps, "steps")
    loop = TrainingLoop(subject)
    loop.settled = settled
    bounds = resolve_limits(limits).with_(subject.limits, f"the subject {subject.name}")
    wanted = frozenset(slug for slug in CHECKS if checks is None or slug in checks)
    with loop.preserved() as start:
        device = device if torch.device(device).type != "cpu" else loop.device_type
        context = Context(loop, start, bounds, wanted, steps or loop.shape.get("steps") or STEPS, device)
        runs: list[Run] = []
        with ending_alike(runs, loop.name, wanted):
            runs.extend(_runs(context, checks, progress))  # keeps the runs before an exception
    merged = merge(runs)
    reported = (f for f in merged.findings if checks is None or f.check in checks or f.check == "coverage")
    title = f"audit of {loop.name}"
    return replace(merged, findings=tuple(reported), environment=environment(device), title=title)


@restoring
def assert_training(
    subject: object,
    *,
    device: str = "cpu",
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
    slugs = None if checks is None else parse_names(checks, "checks", for_kind(Kind.TRAINING))
    loop = replace(loop, name=name or loop.name)
    return verify(judge_training(loop, slugs, limits, steps=steps, device=device))


def _runs(context: Context, checks: Collection[str] | None, progress: Progress) -> Iterator[Run]:
    """The run of each stage that judges a wanted check."""
    loop = context.loop
    stages = [s for s in STAGES if not loop.empty and not context.wanted.isdisjoint(map(str, s.checks))]
    done = count()

    def report(stage: str) -> None:
        progress(f"{loop.name}: {stage}", next(done), len(stages) + 2)

    report("plain steps")
    yield observe_steps(context)
    stopped = context.seen.stopped
    fatal = agreed(stopped is not None and context.seen.steps == 0)
    for stage in stages:
        report(stage.name)
        context.start.restore()
        if fatal and stage.needs_step:
            yield _prevented(context, stage)
            continue
        with quiet():
            run = stage.judge(context)
        yield replace(run, findings=tuple(unjudged(run.findings, context.seen)))
    context.start.restore()
    report("use of autocast")
    if not fatal and (checks is None or set(checks) - {*CHECKS, "coverage"}):
        with quiet():
            run = judge_use(loop.subject, checks)
        if stopped is not None:  # reported already, with its step and line
            run = replace(run, findings=tuple(f for f in run.findings if f.check != "coverage"))
        yield run
    report("done")


def _prevented(context: Context, stage: Stage) -> Run:
    """Incomplete checks of a stage without a first step; skipped where memory was short, or nothing was to judge."""
    seen = context.seen
    memory = seen.stopped is not None and seen.stopped.kind == "memory"
    scaled = any(scaler.is_enabled() for scaler in context.loop.reached.scalers.values())
    idle = {RESUME: context.loop.save is None, SCALE_INVARIANCE: not scaled}
    message = "not judged: the first step did not come to its end, see coverage"
    hint = "mend the step that coverage names, so that step(0) returns its loss"
    checks = [check for check in stage.checks if check is not SCALER_PROTOCOL]
    verdicts = [Verdict.SKIP if memory or idle.get(check) else Verdict.INCOMPLETE for check in checks]
    pairs = zip(checks, verdicts, strict=True)
    return Run(findings=tuple(c.finding(verdict, seen.subject, message, hint=hint) for c, verdict in pairs))
