"""The checks of a callable besides its use of autocast: its values, running sums, total norms, float32 products."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ampcheck.catalog.numerics import COVERAGE
from ampcheck.catalog.training import REDUCE_PRECISION, TF32
from ampcheck.core.limits import Limits
from ampcheck.core.run import Coverage, Run, Verdict
from ampcheck.numerics.checks import OBSERVABLE
from ampcheck.numerics.execution import judge_unfollowed
from ampcheck.numerics.measure import unfollowed
from ampcheck.numerics.observe import block_run, measure_block
from ampcheck.shadow import Shadow
from ampcheck.torchtools.pytree import tensors
from ampcheck.training.reductions.checks import check_reductions, measure_reductions, reduction_table
from ampcheck.training.tf32.operands import OperandStats, check_operands, measure_operands

CHECKS = (*(slug for slug in OBSERVABLE if slug != COVERAGE.slug), REDUCE_PRECISION.slug, TF32.slug)


def judge_call(
    function: Callable[[Callable[[object], None]], object],
    subject: str,
    limits: Limits,
    checks: Collection[str] | None = None,
) -> Run:
    """Call `function(returned)` once, and judge its values, its sums and norms and its products.

    The function passes what the callable returns to `returned`. Skips are reported only for `checks` that name them:
    most callables reduce no gradients.
    """
    values = [slug for slug in OBSERVABLE if checks is None or slug in checks]
    shadow, products = Shadow(judge=values not in ([], [COVERAGE.slug])), list[OperandStats]()

    def returned(result: object) -> None:
        shadow.reach({f"the result {path}".strip(): tensor for path, tensor in tensors(result)})

    def call() -> None:
        products.append(measure_operands(lambda: function(returned), subject))

    sums = measure_reductions(call, subject, shadow)
    judged = [*check_reductions(sums, limits), *(f for stats in products for f in check_operands(stats, limits))]
    coverage = Coverage(unseen=unfollowed(shadow))
    if shadow.judge is not None:
        block = block_run(measure_block(shadow, subject), limits, values)
        coverage = block.coverage
        judged = [*(f for f in block.findings if f.check in OBSERVABLE), *judged]
    elif (unjudged := judge_unfollowed(coverage.unseen)) is not None:
        verdict, text, hint = unjudged
        judged.append(COVERAGE.finding(verdict, subject, text, hint=hint))
    wanted = (*(checks or ()), COVERAGE.slug)
    findings = [f for f in judged if (checks is None and f.verdict is not Verdict.SKIP) or f.check in wanted]
    table = reduction_table(sums)
    return Run(findings=tuple(findings), coverage=coverage, tables=(table,) if table and findings else ())
