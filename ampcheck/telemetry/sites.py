"""The values of a lowered graph that are measured, with their names in the user's model."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import zip_longest
from typing import TypeGuard

import torch
from torch import fx

from ampcheck.core.formats import format_of
from ampcheck.core.run import Where
from ampcheck.ops.traits import traits
from ampcheck.torchtools.interception import dotted
from ampcheck.torchtools.private import CAST, OpOverload
from ampcheck.torchtools.source import is_users, op_name, short_path

WIDE = (torch.float32, torch.float64)
MEASURED = (torch.float32, torch.bfloat16, torch.float16)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims

CASTS = frozenset((_PRIMS.convert_element_type.default, CAST.default))


class Level(str, Enum):
    """Extent of measurement. casts: every rounding to 16 bits that stays one under fusion, which is each cast from a
    wider value and each matrix product or convolution; ops: the result of every op of the user's model; all: every
    floating value of the graph."""

    CASTS = "casts"
    OPS = "ops"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Site:
    """One measured value. at: where it is computed, with the path of its module from the object that the frame calls
    `base`.

    format: the format whose thresholds count. cast: whether a wider value is rounded to it here; without it the value
    is in that format already. op: of the user's model, such as `aten::gelu`. weight: the path of the parameter or
    buffer that is measured, "" for a computed value; nth: its number among values that are alike in all of this (the
    gradients of both operands of one product). before: sites that this value was computed from without another site
    between; fed: it depends on inputs of the graph that are no weights; infinite: a constant that is not finite is
    written into it. order: its number in the graph.
    """

    base: str
    at: Where
    format: str
    cast: bool
    weight: str = ""
    nth: int = 0
    before: tuple[int, ...] = ()
    fed: bool = False
    infinite: bool = False
    order: int = 0


def select_sites(graph: fx.Graph, level: Level, phase: str, sources: Sequence[str] = ()) -> dict[fx.Node, Site]:
    """The sites of a lowered graph by their nodes, in its order.

    phase: of the graph. sources: what each input of the graph is in the user's frame.
    """
    selected: dict[fx.Node, _Selected] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not _is_measured(value):
            continue
        source = node.args[0] if node.target in CASTS else None
        if isinstance(source, fx.Node) and isinstance(operand := source.meta.get("val"), torch.Tensor):
            if value.dtype.itemsize == 2 and operand.dtype in WIDE:
                if source not in selected or not selected[source].cast:
                    selected[source] = _Selected(node, value.dtype, cast=True)
            elif level is Level.ALL and operand.is_floating_point() and node not in selected:
                selected[node] = _Selected(node, value.dtype)
            continue
        if moves(node.target) or node in selected:
            continue
        rounds = value.dtype.itemsize == 2 and is_product(node)
        if level is Level.ALL or (level is Level.OPS and _leaves_op(node)) or rounds:
            selected[node] = _Selected(node, value.dtype)
    return _sites(graph, selected, phase, sources)


def _is_measured(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value of a graph can be measured: nothing has no largest element, and a check for that at run
    time would end the user's run."""
    if not isinstance(value, torch.Tensor) or value.dtype not in MEASURED or value.layout is not torch.strided:
        return False
    return not (any(isinstance(n, int) and n == 0 for n in value.shape) or _is_of_unknown_size(value))


def ops_in_16_bits(graph: fx.Graph, phase: str) -> list[Where]:
    """The user's ops, but for casts and moves, that take and give floating values of 16 bits alone, in their order.

    An op that was decomposed is one; what its parts hand on to each other is no rounding.
    """
    parts: dict[tuple[Where, object], set[fx.Node]] = {}
    for node in graph.nodes:
        op = node.meta.get("original_aten") or node.target
        if node.op == "call_function" and not (op in CASTS or moves(op)):
            where = Where(_phase(node, phase), _module(node)[1], _op(node), *_line(node))
            parts.setdefault((where, node.meta.get("seq_nr")), set()).add(node)
    found = []
    for (where, _), nodes in parts.items():
        taken = {source for node in nodes for source in node.all_input_nodes} - nodes
        given = {node for node in nodes if not nodes.issuperset(node.users)}
        values = [node.meta.get("val") for node in taken | given]
        sizes = {v.dtype.itemsize for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point}
        if sizes and max(sizes) <= 2:
            found.append(where)
    return found


def of_unknown_size(graph: fx.Graph) -> int:
    """Return how many results have a size that depends on values (those of `nonzero`, or of a mask): they are not
    measured."""
    values = [node.meta.get("val") for node in graph.nodes if node.op == "call_function"]
    return sum(isinstance(v, torch.Tensor) and v.dtype in MEASURED and _is_of_unknown_size(v) for v in values)


def _is_of_unknown_size(value: torch.Tensor) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports sympy: only where a graph is

    return bool(free_unbacked_symbols(value))


def moves(target: object) -> bool:
    """Return whether an op only moves values, which are measured where they are computed, or fills in constants."""
    if not isinstance(target, OpOverload) or target in CASTS:
        return target is operator.getitem
    op = traits(target)
    return op.view or op.places or op.unset or op.copies is not None or op.fills in ("units", "number", "range")


def is_product(node: fx.Node) -> bool:
    """Return whether a node is computed by a library, which rounds its 16-bit result before anything else is
    computed."""
    return isinstance(node.target, OpOverload) and traits(node.target).contracts


def _leaves_op(node: fx.Node) -> bool:
    """Return whether the value is a result of the user's op, not an intermediate value of its decomposition."""
    key = node.meta.get("original_aten"), node.meta.get("seq_nr")
    return any((user.meta.get("original_aten"), user.meta.get("seq_nr")) != key for user in node.users)


@dataclass(frozen=True, slots=True)
class _Selected:
    """A measured node. label: the node that has its op, module and line."""

    label: fx.Node
    dtype: torch.dtype
    cast: bool = False


@dataclass(frozen=True, slots=True)
class _Past:
    """Nodes that a value was computed from, back to the sites before it."""

    sites: frozenset[int] = frozenset()
    fed: bool = False
    infinite: bool = False

    def __or__(self, other: _Past) -> _Past:
        return _Past(self.sites | other.sites, self.fed or other.fed, self.infinite or other.infinite)


def _sites(
    graph: fx.Graph, selected: dict[fx.Node, _Selected], phase: str, sources: Sequence[str]
) -> dict[fx.Node, Site]:
    sites: dict[fx.Node, Site] = {}
    past: dict[fx.Node, _Past] = {}
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    weights = dict(zip_longest(inputs, (split_source(source)[1] for source in sources), fillvalue=""))
    alike: Counter[Site] = Counter()
    for node in graph.nodes:
        fed = node.op == "placeholder" and not weights[node]
        before = _Past(fed=fed, infinite=_writes_infinity(node))
        for source in node.all_input_nodes:
            before |= past[source]
        past[node] = before
        if node in selected:
            label, dtype, cast = selected[node].label, selected[node].dtype, selected[node].cast
            base, module = _module(label)
            at = Where(_phase(label, phase), module, _op(label), *_line(label))
            site = Site(base, at, format_of(dtype).name, cast, weights.get(node, ""))
            past[node] = _Past(frozenset((len(sites),)))
            sites[node] = replace(
                site,
                nth=alike[site],
                before=tuple(sorted(before.sites)),
                fed=before.fed,
                infinite=before.infinite,
                order=len(sites),
            )
            alike[site] += 1
    return sites


def _writes_infinity(node: fx.Node) -> bool:
    """Return whether a constant among the arguments is not finite; reductions start from one, but no node says so."""
    return any(isinstance(v, float) and not math.isfinite(v) for v in (*node.args, *node.kwargs.values()))


def _phase(node: fx.Node, phase: str) -> str:
    """A backward graph recomputes parts of forward where activations are checkpointed; they are forward values."""
    if phase != "backward":
        return "forward"
    tag = node.meta.get("partitioner_tag")  # on each node since 2.2; `recompute` is there only for a checkpoint
    recomputed = tag == "is_forward" if tag else "recompute" in node.meta
    return "forward" if recomputed else "backward"


def _op(node: fx.Node) -> str:
    target = node.meta.get("original_aten") or node.target
    return op_name(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


def _module(node: fx.Node) -> tuple[str, str]:
    """`L['self']` and `blocks.0.up` of the innermost module that the op ran in; the root's own ops have the path ''."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple)]
    if not paths:
        return "", ""
    base, path = split_source(dotted(paths[-1]))
    return base, re.sub(r"\[(\d+)\]", r".\1", path).removeprefix(".")  # some releases write `[0]`, others `.0`


def split_source(source: str) -> tuple[str, str]:
    """`L['self'].blocks.0.up` as `L['self']` and `blocks.0.up`."""
    match = re.match(r"^([A-Z]\['[^']*'\](?:\[\d+\])*|[A-Za-z_]\w*)\.?(.*)$", source)
    return (match[1], match[2]) if match else ("", source)


def _line(node: fx.Node) -> tuple[str, int | None]:
    """The innermost line of the user's code that the op came from."""
    frames = [(path, int(line)) for path, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
    users = [(path, line) for path, line in frames if is_users(path)]
    path, line = (users or frames or [("", 0)])[-1]
    return (short_path(path), line) if path else ("", None)
