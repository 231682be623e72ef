"""What a callable computes besides its use of autocast: running sums, total norms, and float32 products."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ampcheck.core.limits import Limits
from ampcheck.core.run import Run, Verdict
from ampcheck.training.reductions.checks import check_reductions, measure_reductions, reduction_table
from ampcheck.training.tf32.operands import OperandStats, check_operands, measure_operands

CHECKS = ("reduce-precision", "tf32")


def judge_call(function: Callable[[], Any], subject: str, limits: Limits, checks: Collection[str] | None = None) -> Run:
    """Call `function()` once, and judge its sums and norms (`reduce-precision`) and its products (`tf32`).

    What there was nothing of is told only where it was asked for: most callables reduce no gradients.
    """
    products: list[OperandStats] = []
    sums = measure_reductions(lambda: products.append(measure_operands(function, subject)), subject)
    found = [*check_reductions(sums, limits), *(f for one in products for f in check_operands(one, limits))]
    told = [f for f in found if (checks is None and f.verdict is not Verdict.SKIP) or f.check in (checks or ())]
    table = reduction_table(sums)
    return Run(findings=tuple(told), tables=(table,) if table and told else ())
