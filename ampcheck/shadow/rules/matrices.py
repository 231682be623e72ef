"""Products that have no kernel in float64; determinants and solutions."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


@rule("_grouped_mm")
def _grouped(call: Call, side: Side) -> Any:
    """Products of groups of rows (or columns) with a matrix each; `offs` holds the ends of the groups."""
    a, b = side.of(call.args[0]), side.of(call.args[1])
    ends = call.argument("offs")
    if ends is None:
        return a @ b
    bounds = ends.tolist()
    spans = list(zip([0, *bounds[:-1]], bounds, strict=True))
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    if a.dim() == 2:
        rest = a.new_zeros(a.shape[0] - bounds[-1], b.shape[-1])
        return torch.cat([*(a[i:j] @ weight for (i, j), weight in zip(spans, b, strict=True)), rest])
    return torch.cat([weight @ b[:, i:j] for (i, j), weight in zip(spans, a, strict=True)], 1)


@rule("addbmm_")
def _added(call: Call, side: Side) -> Any:
    """A sum of products that is added to a tensor, which grows to their shape."""
    start, batches = call.kept, [side.of(t) for t in call.args[1:3]]
    assert start is not None
    x = side.of(call.args[0])
    if start.shape != call.args[0].shape:  # the memory has grown; its first elements are those of before
        x = x.as_strided(start.shape, start.stride())
    return torch.addbmm(x, *batches, beta=call.argument("beta"), alpha=call.argument("alpha"))


@rule("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex")
def _factored(call: Call, side: Side) -> Any:
    """They do not depend on the order of rows in which a matrix is factored.

    Where another row comes first, the factors are those of the run, as their order is: backward reads both.
    """
    results = list(side.run(call))
    order = [result.name for result in call.op._schema.returns].index("pivots")
    if not torch.equal(results[order], call.out[order]):
        results[order - 1] = side.convert(call.out[order - 1])
        results[order] = call.out[order]
    return results
