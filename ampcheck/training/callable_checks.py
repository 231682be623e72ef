"""The checks of a callable besides its use of autocast: values, sums and norms, float32 products, and training."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from ampcheck.catalog.numerics import COVERAGE
from ampcheck.catalog.training import REDUCE_PRECISION, SCALE_INVARIANCE, TF32
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, ModelMap, Run, Verdict
from ampcheck.numerics.checks import OBSERVABLE
from ampcheck.numerics.execution import judge_unfollowed
from ampcheck.numerics.measure import unfollowed
from ampcheck.numerics.observe import block_run, measure_block
from ampcheck.torchtools.pytree import tensors
from ampcheck.training.gradients.invariance_check import check_invariance
from ampcheck.training.judge import STEPS
from ampcheck.training.judge_running import judge_running
from ampcheck.training.loop import LoopShadow
from ampcheck.training.reductions.checks import check_reductions, reduction_stats, reduction_table
from ampcheck.training.running import TrainingWatch
from ampcheck.training.scaled_calls import measure_scaled_call, uses_scaler
from ampcheck.training.tf32.operands import check_operands, measure_operands
from ampcheck.training.values import VALUES, together

CHECKS = (*VALUES, REDUCE_PRECISION.slug, TF32.slug)

_SCALES = SCALE_INVARIANCE.slug

Runner = Callable[[Callable[[], object]], object]


def judge_call(
    function: Callable[[Runner], object],
    subject: str,
    limits: Limits,
    checks: Collection[str] | None = None,
    *,
    steps: int | None = None,
    horizon: int | None = None,
    again: Callable[[], object] | None = None,
) -> Run:
    """Call `function(run)` once, and judge its values, its sums and norms, its products, and the training in it.

    The function calls the user's callable by `run(callable)`. Training is what steps an optimizer; it is ended after
    `steps` steps; `horizon` are planned. Skips are reported only for `checks` that name them: most callables reduce no
    gradients. That of `scale-invariance` is reported wherever a GradScaler is in use. again: the user's callable, whose
    first steps run again at other loss scales.
    """
    values = [slug for slug in OBSERVABLE if checks is None or slug in checks]
    shadow = LoopShadow(judge=values not in ([], [COVERAGE.slug]))
    results: list[object] = []  # alive until the block is judged: a NaN that is returned is kept
    training = TrainingWatch(subject, STEPS if steps is None else steps, shadow, horizon=horizon)

    def run(call: Callable[[], object]) -> object:
        results.append(result := training.call(call))
        shadow.reach({f"the result {path}".strip(): tensor for path, tensor in tensors(result)})
        return result

    with training.watching():
        products = measure_operands(lambda: function(run), subject)
    sums = reduction_stats(training.following.sums, training.following.lineage, subject)
    judged = [*check_reductions(sums, limits), *check_operands(products, limits)]
    coverage = Coverage(unseen=unfollowed(shadow))
    maps: tuple[ModelMap, ...] = ()
    if shadow.judge is not None:
        block = block_run(measure_block(shadow, subject), limits, values)
        coverage, maps = block.coverage, block.maps
        judged = [*block.findings, *judged]
    elif (unjudged := judge_unfollowed(coverage.unseen)) is not None:
        verdict, text, hint = unjudged
        judged.append(COVERAGE.finding(verdict, subject, text, hint=hint))
    learned = judge_running(training, limits, checks)
    steps_alone = list(learned.findings)
    scaled = any(scaler.is_enabled() for scaler in training.loop.reached.scalers.values())
    if again is not None and uses_scaler(events := training.recorder.events) and (checks is None or _SCALES in checks):
        stats = measure_scaled_call(again, subject, events)
        steps_alone = [*(f for f in steps_alone if f.check != _SCALES), *check_invariance(stats)]
    judged = together(judged, steps_alone)
    wanted = (*(checks or ()), COVERAGE.slug, *([_SCALES] if checks is None and scaled else ()))
    findings = [f for f in judged if (checks is None and f.verdict is not Verdict.SKIP) or f.check in wanted]
    table = reduction_table(sums)
    block_tables = (table,) if table and findings else ()
    return replace(
        learned,
        findings=tuple(findings),
        coverage=coverage + learned.coverage + Coverage(unseen=sums.coverage.unseen),
        tables=(*learned.tables, *block_tables),
        maps=maps,
    )
