"""Determinants and solutions: they do not depend on the order of rows in which a matrix is factored."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


@rule("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex")
def _factored(call: Call, side: Side) -> Any:
    """Where another row comes first, the factors are those of the run, as their order is: backward reads both."""
    results = list(side.run(call))
    order = [result.name for result in call.op._schema.returns].index("pivots")
    if not torch.equal(results[order], call.out[order]):
        results[order - 1] = side.convert(call.out[order - 1])
        results[order] = call.out[order]
    return results
