"""The checks of a callable besides its use of autocast: running sums, total norms, and float32 products."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ampcheck.catalog.training import REDUCE_PRECISION, TF32
from ampcheck.core.limits import Limits
from ampcheck.core.run import Run, Verdict
from ampcheck.training.reductions.checks import check_reductions, measure_reductions, reduction_table
from ampcheck.training.tf32.operands import OperandStats, check_operands, measure_operands

CHECKS = (REDUCE_PRECISION.slug, TF32.slug)


def judge_call(
    function: Callable[[], object], subject: str, limits: Limits, checks: Collection[str] | None = None
) -> Run:
    """Call `function()` once, and judge its sums and norms (`reduce-precision`) and its products (`tf32`).

    Skips are reported only for `checks` that name them: most callables reduce no gradients.
    """
    products: list[OperandStats] = []
    sums = measure_reductions(lambda: products.append(measure_operands(function, subject)), subject)
    judged = [*check_reductions(sums, limits), *(f for stats in products for f in check_operands(stats, limits))]
    findings = [f for f in judged if (checks is None and f.verdict is not Verdict.SKIP) or f.check in (checks or ())]
    table = reduction_table(sums)
    return Run(findings=tuple(findings), tables=(table,) if table and findings else ())
