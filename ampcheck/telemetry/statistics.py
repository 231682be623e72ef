"""The reductions that are appended to a lowered graph, and the layout of their packed result.

Rounding to nearest is monotone, so thresholds on a value (from `formats`) give the result of its cast, whether or not a
fused kernel has rounded the value already. Every reduction runs over all of a value at once: in that shape Inductor
fuses it into the loop that computes the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ampcheck.core.formats import format_of
from ampcheck.telemetry.sites import CASTS, Site, is_product

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims

_EXACT = torch.iinfo(torch.int32).max
"""Counts up to here fit in int32, which is the cheapest to add in: a long sum in float32 is added in cascades."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The contents of a packed vector.

    entries: the site and the name of each of its numbers. amax: the largest finite magnitude; smallest: the smallest
    nonzero one, infinity if there is none. All other names are counts of elements up to a threshold on the magnitude:
    zero (0), lost (rounds to zero), tiny (to zero or a subnormal), kept (to a finite value), finite, number (all but
    NaN); nan. numels: elements of each site, None where its shape is symbolic; it then has `nan`.
    """

    entries: tuple[tuple[int, str], ...]
    numels: tuple[int | None, ...]


def append_statistics(module: fx.GraphModule, sites: Mapping[fx.Node, Site]) -> Layout:
    """Append one float64 vector with the statistics of all `sites` to the outputs of a lowered graph."""
    graph = module.graph
    nodes = list(graph.nodes)
    output = nodes[-1]
    entries: list[tuple[int, str]] = []
    groups: dict[tuple[torch.dtype, int], list[tuple[tuple[int, str], fx.Node]]] = {}
    for number, (node, site) in enumerate(sites.items()):
        emit = _Emitter(graph, _insertion_point(nodes, node), node)
        for name, total in _reductions(emit, node, site):
            value = total.meta["val"]
            groups.setdefault((value.dtype, value.ndim), []).append(((number, name), total))
    emit = _Emitter(graph, output, next(iter(sites)))
    parts: list[fx.Node] = []
    for (_, ndim), group in groups.items():
        each = [total if ndim else emit(_ATEN.reshape.default, total, [1]) for _, total in group]
        whole = emit(_ATEN.cat.default, each) if len(each) > 1 else each[0]
        parts.append(emit.to(emit(_ATEN.reshape.default, whole, [-1]), torch.float64))
        entries += [entry for entry, _ in group]
    packed = emit(_ATEN.cat.default, parts) if len(parts) > 1 else parts[0]
    output.args = ((*output.args[0], packed),)
    module.recompile()
    return Layout(tuple(entries), tuple(numel_of(node) for node in sites))


class _Emitter:
    """Adds nodes to a graph before another node, with the shapes and dtypes that Inductor needs."""

    def __init__(self, graph: fx.Graph, before: fx.Node, like: fx.Node) -> None:
        self._graph, self._before = graph, before
        self._mode = like.meta["val"].fake_mode
        self.device: torch.device = like.meta["val"].device

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(op, args, kwargs)
        fake: Any = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        with self._mode:
            node.meta["val"] = op(*fake[0], **fake[1])
        return node

    def to(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if node.meta["val"].dtype is dtype else self(_PRIMS.convert_element_type.default, node, dtype)

    def where(self, test: fx.Node, yes: float | fx.Node, no: float | fx.Node) -> fx.Node:
        return self(_ATEN.where.self, test, self._node(yes), self._node(no))

    def _node(self, value: float | fx.Node) -> fx.Node:
        if isinstance(value, fx.Node):
            return value
        return self(_ATEN.full.default, [], value, dtype=torch.float32, device=self.device, pin_memory=False)


def numel_of(node: fx.Node) -> int | None:
    """The elements of a value; None where its shape is symbolic."""
    shape = node.meta["val"].shape
    return math.prod(shape) if all(isinstance(n, int) for n in shape) else None


def _insertion_point(nodes: Sequence[fx.Node], node: fx.Node) -> fx.Node:
    """The node before which the statistics of a value are inserted: behind the next library call, by which Inductor has
    written the operands of that call. It fuses a reduction into an earlier loop over the same value, not into a later
    one; and the value must not be kept for longer than needed. A weight is an input of the graph: its cast counts."""
    begin = nodes.index(node)
    if node.op != "call_function":
        begin = min((nodes.index(user) for user in node.users if user.target in CASTS), default=begin)
    return next((nodes[i + 1] for i in range(begin + 1, len(nodes) - 1) if is_product(nodes[i])), nodes[-1])


def _reductions(emit: _Emitter, node: fx.Node, site: Site) -> list[tuple[str, fx.Node]]:
    """The statistics of one value with their names, each of one element in as many dimensions: Inductor writes such
    results directly to where they are packed; after a reshape each would first have memory of its own."""
    magnitude = emit(_ATEN.abs.default, emit.to(node, torch.float32))
    dims = list(range(magnitude.meta["val"].ndim))
    numel = numel_of(node)
    limits = thresholds(site)
    above = emit(_ATEN.gt.Scalar, magnitude, limits["zero" if site.cast else "lost"])
    smallest = emit(_ATEN.amin.default, emit.where(above, magnitude, math.inf), dims, True)
    tests: dict[str, fx.Node] = {}
    for name in counted(site):
        below = _ATEN.lt.Scalar if name in ("tiny", "kept", "finite") else _ATEN.le.Scalar
        tests[name] = emit(below, magnitude, limits[name])
    if numel is None:
        tests["nan"] = emit(_ATEN.ne.Tensor, magnitude, magnitude)
    largest = emit.where(tests["finite" if site.cast else "kept"], magnitude, 0.0)
    kind = torch.int32 if numel is not None and numel <= _EXACT else torch.int64
    return [
        ("amax", emit(_ATEN.amax.default, largest, dims, True)),
        ("smallest", smallest),
        *(
            (name, emit(_ATEN.sum.dim_IntList, emit.to(test, kind), dims, True, dtype=kind))
            for name, test in tests.items()
        ),
    ]


def thresholds(site: Site) -> dict[str, float]:
    """The magnitude up to which each count of `Layout` goes: zero, lost and number include it, the others do not."""
    fmt = format_of(site.format)
    kept = fmt.overflows_at if fmt.bits <= 16 else math.inf
    below = {"zero": 0.0, "lost": fmt.flushes_at, "tiny": fmt.subnormal_below, "kept": kept}
    return {**below, "finite": math.inf, "number": math.inf}


def counted(site: Site) -> tuple[str, ...]:
    """The names of the counts of a site. A value in its format already is what it rounds to."""
    return ("zero", "lost", "tiny", "kept", "finite", "number") if site.cast else ("lost", "tiny", "kept", "number")
