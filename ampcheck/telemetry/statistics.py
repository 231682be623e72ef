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

BELOW = ("tiny", "kept", "finite")
"""Counts of elements below their threshold; the others include it."""

_MAGNITUDE, _INFINITE = 0x7FFF_FFFF, 0x7F80_0000
"""The bits of float32 without the sign, and those of infinity."""

_NEVER_SMALL = 2.0**-100
"""Most models have no subnormal of a format whose normal numbers reach below this: the lean statistics count none."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The contents of a packed vector.

    entries: the site and the name of each of its numbers. amax: the largest magnitude, finite where `finite` (or, of a
    value that is in its format already, `kept`) is counted too, else NaN or infinite if a value was; smallest: the
    smallest nonzero one, infinity if there is none. All other names are counts of elements up to a threshold on the
    magnitude: zero (0), lost (rounds to zero), tiny (to zero or a subnormal), kept (to a finite value), finite, number
    (all but NaN); nan. numels: elements of each site, None where its shape is symbolic; it then has `number` and `nan`.
    """

    entries: tuple[tuple[int, str], ...]
    numels: tuple[int | None, ...]


def append_statistics(module: fx.GraphModule, sites: Mapping[fx.Node, Site], *, full: bool) -> Layout:
    """Append one float64 vector with the statistics of all `sites` to the outputs of a lowered graph.

    full: everything that `Layout` names. Otherwise the lean set, which is complete as long as no value overflows, is
    inf or NaN, or is smaller than the normal numbers of a format that reaches down as far as float32 does; see
    `Accumulator.is_incomplete`.
    """
    graph = module.graph
    nodes = list(graph.nodes)
    output = nodes[-1]
    entries: list[tuple[int, str]] = []
    groups: dict[tuple[torch.dtype, int, int | None], list[tuple[tuple[int, str], fx.Node]]] = {}
    for number, (node, site) in enumerate(sites.items()):
        emit = _Emitter(graph, _insertion_point(nodes, node), node)
        for name, offset, total in _reductions(emit, node, site, full or site.infinite):
            value = total.meta["val"]
            groups.setdefault((value.dtype, value.ndim, offset), []).append(((number, name), total))
    emit = _Emitter(graph, output, next(iter(sites)))
    parts: list[fx.Node] = []
    for (_, ndim, offset), group in groups.items():
        each = [total if ndim else emit(_ATEN.reshape.default, total, [1]) for _, total in group]
        whole = emit(_ATEN.cat.default, each) if len(each) > 1 else each[0]
        parts.append(_unpacked(emit, emit(_ATEN.reshape.default, whole, [-1]), offset))
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


def _reductions(emit: _Emitter, node: fx.Node, site: Site, full: bool) -> list[tuple[str, int | None, fx.Node]]:
    """The statistics of one value: a name, an offset, and a number of one element in as many dimensions. Inductor
    writes such results directly to where they are packed; after a reshape each would first have memory of its own.

    Magnitudes are compared by their bits, int32, which are in the same order, NaN above infinity: a vectorized minimum
    of floating-point numbers takes three instructions, as NaN has to spread, and a test that is counted another three.
    Counts have no offset: they are sums of the signs of differences, 0 or -1. An offset is to be added to a magnitude.
    """
    bits = emit(_ATEN.view.dtype, emit.to(node, torch.float32), torch.int32)
    magnitude = emit(_ATEN.bitwise_and.Scalar, bits, _MAGNITUDE)
    dims = list(range(magnitude.meta["val"].ndim))
    numel = numel_of(node)
    kind = torch.int32 if numel is not None and numel <= _EXACT else torch.int64

    def up_to(limit: int) -> fx.Node:
        """-1 for each magnitude up to a limit, else 0."""
        return emit(_ATEN.bitwise_right_shift.Tensor_Scalar, emit(_ATEN.sub.Scalar, magnitude, limit + 1), 31)

    # A limit that is to be excluded counts up to the magnitude before it.
    limits = {name: _bits(limit, below=name in BELOW) - (name in BELOW) for name, limit in thresholds(site).items()}
    tests = {name: up_to(limits[name]) for name in counted(site, full)}
    largest = emit(_ATEN.bitwise_and.Tensor, magnitude, tests["finite" if site.cast else "kept"]) if full else magnitude
    # What is not above the limit has a negative difference, which is the largest without its sign.
    offset = limits["zero" if site.cast else "lost"] + 1
    above = emit(_ATEN.bitwise_and.Scalar, emit(_ATEN.sub.Scalar, magnitude, offset), _MAGNITUDE)
    if numel is None:
        tests["number"] = tests.get("number") or up_to(_INFINITE)
        distance = emit(_ATEN.add.Scalar, emit(_ATEN.neg.default, magnitude), _INFINITE)
        tests["nan"] = emit(_ATEN.bitwise_right_shift.Tensor_Scalar, distance, 31)
    return [
        ("amax", 0, emit(_ATEN.amax.default, largest, dims, True)),
        ("smallest", offset, emit(_ATEN.amin.default, above, dims, True)),
        *((name, None, emit(_ATEN.sum.dim_IntList, test, dims, True, dtype=kind)) for name, test in tests.items()),
    ]


def _unpacked(emit: _Emitter, numbers: fx.Node, offset: int | None) -> fx.Node:
    """The statistics that some results of `_reductions` stand for, float64."""
    if offset is None:
        return emit(_ATEN.neg.default, emit.to(numbers, torch.float64))
    if offset:  # no magnitude was above the limit, or only NaN: the smallest is infinity
        numbers = emit(_ATEN.add.Scalar, emit(_ATEN.clamp_max.default, numbers, _INFINITE - offset), offset)
    return emit.to(emit(_ATEN.view.dtype, numbers, torch.float32), torch.float64)


def _bits(limit: float, *, below: bool = False) -> int:
    """The bits of the largest float32 up to a limit; below: of the smallest that is not below it."""
    nearest = torch.tensor(limit, dtype=torch.float32)
    bits = int(nearest.view(torch.int32))
    return bits + (nearest.item() < limit) if below else bits - (nearest.item() > limit)


def thresholds(site: Site) -> dict[str, float]:
    """The magnitude up to which each count of `Layout` goes: zero, lost and number include it, the others do not."""
    fmt = format_of(site.format)
    kept = fmt.overflows_at if fmt.bits <= 16 else math.inf
    below = {"zero": 0.0, "lost": fmt.flushes_at, "tiny": fmt.subnormal_below, "kept": kept}
    return {**below, "finite": math.inf, "number": math.inf}


def counted(site: Site, full: bool) -> tuple[str, ...]:
    """The names of the counts of a site. A value in its format already is what it rounds to."""
    if full:
        return ("zero", "lost", "tiny", "kept", "finite", "number") if site.cast else ("lost", "tiny", "kept", "number")
    small = format_of(site.format).smallest_normal > _NEVER_SMALL
    if site.cast:
        return ("zero", "lost", "tiny") if small else ("zero",)
    return ("lost", "tiny") if small else ("lost",)
