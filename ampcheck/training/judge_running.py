"""The judge of a training loop that was found in code that runs: the checks that need no repetition."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ampcheck.catalog import REGISTRY
from ampcheck.catalog.numerics import COVERAGE
from ampcheck.catalog.training import REDUCE_PRECISION, RESUME, SCALE_INVARIANCE, TF32
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Run, Verdict, merge
from ampcheck.numerics.checks import OBSERVABLE
from ampcheck.numerics.observe import block_run
from ampcheck.numerics.stats import NumericsStats
from ampcheck.training.checkpoints import check_checkpoint_events
from ampcheck.training.judge import CHECKS, STAGES, Context, judge_finite
from ampcheck.training.loop import quiet
from ampcheck.training.observed import check_observed, unjudged
from ampcheck.training.running import TrainingWatch
from ampcheck.training.values import together

_REPEAT = "it runs steps again: hand over {'model': model, 'optimizer': optimizer, 'step': step} with step(i) -> float"
OBSERVED = tuple(slug for slug in CHECKS if slug not in (SCALE_INVARIANCE.slug, REDUCE_PRECISION.slug, TF32.slug))
"""What is judged here of training that runs once; of `resume` the contents of checkpoints."""


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
    findings = [*observed, *judge_finite(context, [seen.losses[number] for number in training.known])]
    findings += check_checkpoint_events(seen.events, loop.name)
    findings += [check.skip(loop.name, f"not judged: {_REPEAT}") for check in (SCALE_INVARIANCE, RESUME)]
    unseen = {f"what comes after the first {seen.steps} steps": 1} if training.ended else {}
    runs = [Run(findings=tuple(findings), coverage=Coverage({"steps": seen.steps, "events": len(seen.events)}, unseen))]
    for stage in STAGES:
        if not stage.repeats and not wanted.isdisjoint(map(str, stage.checks)):
            with quiet():
                run = stage.judge(context)
            runs.append(replace(run, findings=tuple(unjudged(run.findings, seen))))
    merged = merge(runs)
    return replace(merged, findings=tuple(f for f in merged.findings if f.check in (*wanted, COVERAGE.slug)))


def judge_block(training: TrainingWatch, limits: Limits, checks: Collection[str] | None, stats: NumericsStats) -> Run:
    """Judge the values of a block and the training in it. A check that is selected and saw nothing says so."""
    values = None if checks is None else [slug for slug in checks if slug in OBSERVABLE] or None
    block, learned = block_run(stats, limits, values), judge_running(training, limits, checks)
    steps = [f for f in learned.findings if f.verdict is not Verdict.SKIP or f.check in (checks or ())]
    findings = together(list(block.findings), steps)
    absent = [slug for slug in checks or () if slug in OBSERVED and all(f.check != slug for f in findings)]
    why = "not judged: no optimizer was stepped in this block"
    findings += [REGISTRY[slug].skip(stats.subject, why) for slug in absent]
    return replace(merge([block, learned]), findings=tuple(findings))
