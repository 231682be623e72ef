"""The judge of a training loop that was found in code that runs: the checks that need no repetition."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ampcheck.catalog.numerics import COVERAGE
from ampcheck.catalog.training import RESUME, SCALE_INVARIANCE
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Finding, Run, Verdict, merge
from ampcheck.training.checkpoints import check_checkpoint_events
from ampcheck.training.judge import CHECKS, STAGES, Context, judge_finite
from ampcheck.training.loop import quiet
from ampcheck.training.observed import check_observed, unjudged
from ampcheck.training.running import TrainingWatch

_REPEAT = "it runs steps again: hand over {'model': model, 'optimizer': optimizer, 'step': step} with step(i) -> float"


def judge_running(training: TrainingWatch, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """Judge the training that a watch has observed; an empty run where no optimizer was stepped.

    checks: those of training loops, all by default. What needs steps that can run again is skipped.
    """
    seen = training.stats
    if seen is None:
        return Run()
    loop = training.loop
    wanted = frozenset(slug for slug in CHECKS if checks is None or slug in checks)
    context = Context(loop, None, limits, wanted, seen.steps, loop.device_type, repeats=False)
    context.seen = seen
    observed = [f for f in check_observed(replace(seen, stopped=None)) if f.verdict is not Verdict.PASS]
    findings = [*observed, *judge_finite(context, () if training.lossless else seen.losses)]
    findings += check_checkpoint_events(seen.events, loop.name)
    findings += [check.skip(loop.name, f"not judged: {_REPEAT}") for check in (SCALE_INVARIANCE, RESUME)]
    runs = [Run(findings=tuple(findings), coverage=Coverage({"steps": seen.steps, "events": len(seen.events)}))]
    for stage in STAGES:
        if not stage.repeats and not wanted.isdisjoint(map(str, stage.checks)):
            with quiet():
                run = stage.judge(context)
            runs.append(replace(run, findings=tuple(unjudged(run.findings, seen))))
    merged = merge(runs)
    return replace(merged, findings=tuple(f for f in merged.findings if f.check in (*wanted, COVERAGE.slug)))


def together(values: list[Finding], steps: list[Finding]) -> list[Finding]:
    """The findings about the values of a block and about its steps, those of one cause once.

    Where both judge a check, the op that the values name comes before the step, and what fails before what passes.
    """
    bad = (Verdict.FAIL, Verdict.WARN)
    named = {f.check for f in values if f.verdict in bad}
    kept = [f for f in steps if f.check not in named or f.check == COVERAGE.slug]
    failing = {f.check for f in kept if f.verdict in bad} - {COVERAGE.slug}
    return [*(f for f in values if f.check not in failing), *kept]
