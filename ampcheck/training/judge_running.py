"""The judge of code that runs: its values, its sums and products, and the training loop that was found in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ampcheck.checks import REGISTRY, added
from ampcheck.checks import findings as findings_of
from ampcheck.checks.always import judge_unfollowed
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.core.environment import quiet
from ampcheck.core.plan import Plan
from ampcheck.core.run import Coverage, ModelMap, Run, Verdict, merge
from ampcheck.core.subject import Kind
from ampcheck.numerics.checks import observable
from ampcheck.numerics.measure import unfollowed
from ampcheck.numerics.observe import block_run, measure_block
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.resume import SavedStates
from ampcheck.torchtools.pytree import tensors
from ampcheck.training.judge import CHECKS, STAGES, Context, judge_finite
from ampcheck.training.loop import STEPS, LoopShadow
from ampcheck.training.observed import check_observed, unjudged
from ampcheck.training.reductions.sums import reduction_stats, reduction_table
from ampcheck.training.running import TrainingWatch
from ampcheck.training.tf32.operands import measure_operands
from ampcheck.training.values import together

_REPEAT = "it runs steps again: hand over {'model': model, 'optimizer': optimizer, 'step': step} with step(i) -> float"
_RAN_ON = "the code caught every exception that was to end it after its last observed step, and ran on unobserved"
_CATCHES = "catch Exception, not BaseException (a bare `except:`), so that Ctrl-C can end the code too"
OBSERVED = tuple(slug for slug in CHECKS if slug not in ("reduce-precision", "tf32"))
"""Checks of training that runs once; of `resume` the contents of checkpoints."""

Runner = Callable[[Callable[[], object]], object]


def judge_running(training: TrainingWatch, plan: Plan) -> Run:
    """Judge the training that a watch has observed; an empty run where no optimizer was stepped.

    What needs steps that can run again is skipped.
    """
    seen = training.stats
    if seen is None:
        return Run()
    loop = training.loop
    wanted = frozenset(slug for slug in (*CHECKS, *added(Kind.TRAINING, Kind.CALL)) if plan.judges(slug))
    context = Context(loop, None, plan.limits, wanted, seen.steps, loop.device_type)
    context.seen = seen
    observed = [f for f in check_observed(replace(seen, stopped=None)) if f.verdict is not Verdict.PASS]
    findings = [*observed, *judge_finite(context, [seen.losses[number] for number in training.known])]
    findings += findings_of(SavedStates(loop.name, seen.events), plan.limits)
    if training.stopper.ignored:
        findings.append(COVERAGE.incomplete(loop.name, _RAN_ON, hint=_CATCHES))
    findings.append(REGISTRY["resume"].skip(loop.name, f"not judged: {_REPEAT}"))
    unseen = {f"what comes after the first {seen.steps} steps": 1} if training.ended else {}
    runs = [Run(findings=tuple(findings), coverage=Coverage({"steps": seen.steps, "events": len(seen.events)}, unseen))]
    for stage in STAGES:
        if not stage.repeats and stage.judges(wanted):
            with quiet():
                run = stage.judge(context)
            runs.append(replace(run, findings=tuple(unjudged(run.findings, seen))))
    return merge(runs).only((*wanted, COVERAGE.slug))


def judge_block(training: TrainingWatch, plan: Plan, stats: NumericsStats) -> Run:
    """Judge the values of a block and the training in it. A check that is selected and saw nothing says so."""
    checks = plan.checks or ()
    block, learned = block_run(stats, plan.limits, plan.among(observable()) or None), judge_running(training, plan)
    steps = [f for f in learned.findings if f.verdict is not Verdict.SKIP or f.check in checks]
    findings = together(list(block.findings), steps)
    absent = [slug for slug in checks if slug in OBSERVED and all(f.check != slug for f in findings)]
    why = "not judged: no optimizer was stepped in this block"
    findings += [REGISTRY[slug].unjudged(stats.subject, why) for slug in absent]
    return replace(merge([block, learned]), findings=tuple(findings))


def judge_call(function: Callable[[Runner], object], subject: str, plan: Plan) -> Run:
    """Call `function(run)` once, and judge its values, its sums and norms, its products, and the training in it.

    The function calls the user's callable by `run(callable)`. Training is what steps an optimizer; it is ended after
    the steps of the plan. Skips are reported only for selected checks: most callables reduce no gradients. That of
    `scale-invariance` is reported wherever a GradScaler is in use.
    """
    values = [slug for slug in observable() if plan.judges(slug)]
    shadow = LoopShadow(judge=values not in ([], [COVERAGE.slug]))
    results: list[object] = []  # alive until the block is judged: a NaN that is returned is kept
    training = TrainingWatch(subject, STEPS if plan.steps is None else plan.steps, shadow, horizon=plan.horizon)

    def run(call: Callable[[], object]) -> object:
        results.append(result := training.call(call))
        shadow.reach({f"the result {path}".strip(): tensor for path, tensor in tensors(result)})
        return result

    with training.watching():
        products = measure_operands(lambda: function(run), subject)
    sums = reduction_stats(training.following.sums, training.following.lineage, subject)
    judged = [
        *findings_of(sums, plan.limits, ("reduce-precision",)),
        *findings_of(products, plan.limits, ("tf32",)),
    ]
    coverage = Coverage(unseen=unfollowed(shadow))
    maps: tuple[ModelMap, ...] = ()
    if shadow.judge is not None:
        block = block_run(measure_block(shadow, subject), plan.limits, values)
        coverage, maps = block.coverage, block.maps
        judged = [*block.findings, *judged]
    elif (unjudged := judge_unfollowed(coverage.unseen)) is not None:
        verdict, text, hint = unjudged
        judged.append(COVERAGE.finding(verdict, subject, text, hint=hint))
    learned = judge_running(training, plan)
    judged = together(judged, list(learned.findings))
    scales = ["scale-invariance"] if plan.checks is None and training.loop.scalers else []
    wanted = (*(plan.checks or ()), COVERAGE.slug, *scales)
    findings = [f for f in judged if (plan.checks is None and f.verdict is not Verdict.SKIP) or f.check in wanted]
    return replace(
        learned,
        findings=tuple(findings),
        coverage=coverage + learned.coverage + Coverage(unseen=sums.coverage.unseen),
        tables=(*learned.tables, *(reduction_table(sums) if findings else ())),
        maps=maps,
    )
