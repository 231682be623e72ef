"""Which node of the compiled graphs brings a failure: the first k nodes compiled, the rest run eagerly, k bisected.

Works on the graphs that Dynamo hands to a backend, whose nodes are the user's own calls, each with its module and
source line. All of a subject's graphs count as one sequence, in the order in which they are compiled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from ampcheck.core.run import Where
from ampcheck.records.blame import Bisected, Node
from ampcheck.torchtools.private import OpOverload
from ampcheck.torchtools.source import is_users, op_name, short_path

Backend: TypeAlias = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n?\s*(.*)')


class BisectBackend:
    """A backend of `torch.compile` that compiles the first `limit` nodes with `lower` and runs the others eagerly.

    names: paths of the modules by `id`.
    """

    def __init__(self, lower: Backend, limit: float, names: dict[int, str] | None = None) -> None:
        self.nodes: list[Node] = []
        self._lower = lower
        self._limit = limit
        self._names = names or {}

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph, or the part of it that lies before the limit."""
        calls = [node for node in graph.graph.nodes if node.op.startswith("call_")]
        start, base = len(self.nodes), self._running()
        self.nodes += [self._named(node, base) for node in calls]
        inside = self._limit - start
        if inside <= 0:
            return graph.forward
        if inside >= len(calls):
            return self._lower(graph, examples)
        try:
            return self._split(graph, set(calls[: int(inside)]))
        except Exception:  # noqa: BLE001  # a part that cannot be compiled by itself: the graph stays whole
            return graph.forward

    def _split(self, graph: fx.GraphModule, first: set[fx.Node]) -> Callable[..., Any]:
        parts: Any = split_module(graph, graph, lambda node: 0 if node in first else 1, keep_original_order=True)
        part: Any = parts.get_submodule("submod_0")
        call = next(node for node in parts.graph.nodes if node.op == "call_module" and node.target == "submod_0")
        output = part.graph.output_node()
        alone = isinstance(output.args[0], fx.Node)
        if alone:  # AOTAutograd asks for a tuple
            output.args = ((output.args[0],),)
            part.recompile()
        compiled = self._lower(part, [argument.meta["example_value"] for argument in call.args])
        parts.submod_0 = _Part((lambda *inputs: compiled(*inputs)[0]) if alone else compiled)
        run: Callable[..., Any] = parts.forward
        return run

    def _running(self) -> str:
        """The module whose frame is being compiled, from the call stack: in a node's module stack it is left out."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.nn.Module) and id(owner) in self._names:
                return self._names[id(owner)]
            frame = frame.f_back
        return ""

    def _named(self, node: fx.Node, base: str) -> Node:
        stack = node.meta.get("nn_module_stack") or {}
        paths = [self._names[int(key)] for key in stack if str(key).isdigit() and int(key) in self._names]
        file, line, code = _users_frame(node.meta.get("stack_trace") or "")
        where = Where(module=paths[-1] if paths else base, op=_op(node), file=file, line=line)
        return Node(where, code)


class _Part(torch.nn.Module):
    """Compiled code in the place of a graph's part."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *inputs: object) -> Any:
        return self._run(*inputs)


def _op(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return op_name(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"Tensor.{name}" if node.op == "call_method" else str(name)


def _users_frame(trace: str) -> tuple[str, int | None, str]:
    """File, line and text of the innermost frame of the user's code."""
    frames = [(path, int(line), code.strip()) for path, line, code in _FRAME.findall(trace) if is_users(path)]
    if not frames:
        return "", None, ""
    path, line, code = frames[-1]
    return short_path(path), line, code


def first_failing_node(fails: Callable[[Backend], bool], lower: Backend, names: dict[int, str]) -> Bisected:
    """Bisect the nodes of a subject that fails when it is compiled by `lower`.

    fails: run the subject compiled with a backend, and tell whether it fails. names: paths of its modules by `id`; they
    must be those of the modules that run.
    """
    everything = BisectBackend(lower, float("inf"), names)
    if not fails(everything):
        return Bisected(None, len(everything.nodes), 1)
    total, runs = len(everything.nodes), 2
    if fails(BisectBackend(lower, 0, names)):
        return Bisected(None, total, runs)
    good, bad, found = 0, total, everything.nodes
    while bad - good > 1:
        middle = (good + bad) // 2
        backend = BisectBackend(lower, middle, names)
        runs += 1
        if fails(backend):
            bad, found = middle, backend.nodes
        else:
            good = middle
    node = found[min(bad, len(found)) - 1] if found else None
    return Bisected(node, total, runs)
