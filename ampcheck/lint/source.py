"""A file of Python as rules read it: calls in order, with the branches, loops and autocast regions around each."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from ampcheck.core.syntax import dotted, imported_names

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_AUTOCAST = frozenset(
    f"{module}.autocast" for module in ("torch", "torch.amp", "torch.amp.autocast_mode", "torch.cuda.amp",
                                        "torch.cuda.amp.autocast_mode", "torch.cpu.amp")
)  # fmt: skip
_OWN = "<relative>"
"""The package of relative imports, which is none of another's names."""

HALF = frozenset(("torch.float16", "torch.half"))
NARROW = HALF | {"torch.bfloat16"}


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A call in a function.

    name: what is called, with imports resolved, such as `torch.nn.utils.clip_grad_norm_` or `self.scaler.step`; empty
    where that is no dotted name. receiver, method: the name before its last dot, as written, and after it; the receiver
    of a method of an expression is that expression. order: among the calls of the function. branches: of each `if`,
    `try` and `match` around it, its identity and which of its blocks; loops, regions: around it, from the outermost.
    block: the identity of the list of statements that it is in, and the number of its statement.
    """

    node: ast.Call
    name: str
    receiver: str
    method: str
    order: int
    branches: tuple[tuple[int, int], ...]
    loops: tuple[ast.AST, ...]
    regions: tuple[Region, ...]
    block: tuple[int, int]

    @property
    def line(self) -> int:
        """The first line of the call."""
        return self.node.lineno

    def argument(self, number: int, name: str) -> ast.expr | None:
        """An argument by its place or its name; a negative place for none."""
        named = next((keyword.value for keyword in self.node.keywords if keyword.arg == name), None)
        if named is not None or not 0 <= number < len(self.node.args):
            return named
        return self.node.args[number]

    def excludes(self, other: Call) -> bool:
        """Return whether the two are in different blocks of one statement, so that only one of them runs."""
        mine = dict(self.branches)
        return any(mine.get(statement, block) != block for statement, block in other.branches)


@dataclass(frozen=True, eq=False, slots=True)
class Region:
    """An autocast region. device, dtype: as far as they are literals, such as `cuda` and `torch.float16`; empty where
    they are not known. enabled: False only where the region is switched off by a literal; certain: whether it is always
    on."""

    call: ast.Call
    device: str
    dtype: str
    enabled: bool
    certain: bool

    @property
    def is_half(self) -> bool:
        """True if it casts to float16: by its dtype, or by the default of CUDA."""
        return self.enabled and (self.dtype in HALF or (not self.dtype and self.device == "cuda"))


@dataclass(eq=False)
class Scope:
    """A function, or the module outside of all functions. calls: in order. parent: the class, outer: the scope that it
    is defined in."""

    node: Function | ast.Module
    calls: list[Call] = field(default_factory=list)
    parent: ast.ClassDef | None = None
    outer: Scope | None = None

    def of(self, *methods: str) -> Iterator[Call]:
        """The calls of methods or functions of these names."""
        return (call for call in self.calls if call.method in methods)


class Source:
    """A parsed file. Raises `SyntaxError` and `ValueError` as `ast.parse` does."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.tree = ast.parse(text)
        self.imports = dict[str, str]()
        for name, origin in imported_names(self.tree, lambda relative: _OWN):
            if name not in self.imports or not origin.startswith(_OWN):  # one function's own takes no name from another
                self.imports[name] = origin

    @cached_property
    def scopes(self) -> list[Scope]:
        """The module and all functions in it."""
        return _Reader(self).read()

    @cached_property
    def nodes(self) -> dict[int, ast.AST]:
        """Every node of the file by its identity."""
        return {id(node): node for node in ast.walk(self.tree)}

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the file, without their ends."""
        return [line.rstrip("\r\n") for line in split_lines(self.text)]

    @cached_property
    def _regions(self) -> dict[str, Region]:
        """Autocast regions that are kept under a name, such as `ctx = torch.autocast("cuda")`."""
        kept = dict[str, Region]()
        for node in ast.walk(self.tree) if "autocast" in self.text else ():
            if isinstance(node, ast.Assign):
                for region in filter(None, map(self.region, ast.walk(node.value))):
                    kept.update((name, region) for name in map(dotted, node.targets) if name)
        return kept

    def region_of(self, node: ast.expr) -> Region | None:
        """The region that a context manager is: a call, a conditional one, or a name of one."""
        found = next(filter(None, map(self.region, ast.walk(node))), None)
        return found or self._regions.get(dotted(node))

    def resolve(self, node: ast.AST | None) -> str:
        """The dotted name of an expression, with the names of imports resolved; empty for any other expression."""
        name = dotted(node)
        first, dot, rest = name.partition(".")
        return f"{self.imports.get(first, first)}{dot}{rest}" if name else ""

    def is_torchs(self, call: Call) -> bool:
        """Return whether a call may be one of PyTorch: of a name that is imported from it, or of a method of an object.

        A function or a module of another package is none, nor is a method of the class that calls it.
        """
        first = call.receiver.partition(".")[0]
        is_method = isinstance(call.node.func, ast.Attribute) and call.receiver not in ("self", "cls", "super()")
        return call.name.startswith("torch.") or (is_method and first not in self.imports)

    def is_narrow(self, node: ast.AST | None, dtypes: frozenset[str] = NARROW) -> bool:
        """Return whether an expression names one of these dtypes."""
        return self.resolve(node) in dtypes

    def casts(self, call: Call, dtypes: frozenset[str] = HALF) -> bool:
        """Return whether a call is `x.half()`, `x.to(torch.float16)` and the like."""
        if call.method in ("half", "bfloat16") and not call.node.args:
            return f"torch.{call.method}" in dtypes
        values = (*call.node.args, *(keyword.value for keyword in call.node.keywords if keyword.arg == "dtype"))
        return call.method in ("to", "type") and any(self.is_narrow(value, dtypes) for value in values)

    def region(self, node: ast.AST | None) -> Region | None:
        """The autocast region that an expression makes; None for any other expression."""
        if not isinstance(node, ast.Call) or (name := self.resolve(node.func)) not in _AUTOCAST:
            return None
        of_device = next((device for device in ("cuda", "cpu") if f".{device}.amp" in name), "")
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        device = of_device or _text(node.args[0] if node.args else named.get("device_type"))
        place = 1  # in both signatures: (device_type, dtype, enabled) and (enabled, dtype)
        dtype = named.get("dtype", node.args[place] if len(node.args) > place else None)
        enabled = named.get("enabled", node.args[0] if of_device and node.args else None)
        narrow = self.resolve(dtype) or ("?" if dtype is not None else "")
        literal = isinstance(enabled, ast.Constant)
        on = bool(getattr(enabled, "value", True)) if literal else True
        return Region(node, device.split(":")[0], narrow, on, on and (enabled is None or literal))


def split_lines(text: str) -> list[str]:
    """The lines with their ends, as Python counts them: `str.splitlines` also ends one at a form feed, among others."""
    return list(io.StringIO(text, newline=""))


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it, but for the functions that it contains."""
    nodes = [node]
    while nodes:
        yield (inner := nodes.pop())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        nodes += [child for child in ast.iter_child_nodes(inner) if not isinstance(child, functions)]


def number_of(node: ast.AST | None) -> float | None:
    """The number that a literal is, also `-1e9` and `float("-inf")` without an infinity; None for anything else."""
    sign = 1.0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1.0, node.operand
    if isinstance(node, ast.Call) and dotted(node.func) == "float" and len(node.args) == 1:
        return number_of(node.args[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return sign * float(node.value)
    return None


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


_BRANCHES: dict[type[ast.AST], tuple[str, ...]] = {
    ast.If: ("body", "orelse"),
    ast.IfExp: ("body", "orelse"),
    ast.Try: ("body", "handlers"),
    ast.Match: ("cases",),
}
"""The fields of statements whose parts exclude each other; each handler and each case is a part of its own."""

_LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
"""Nodes that contain none of what is read."""


@dataclass(frozen=True, slots=True)
class _Around:
    """Scope, branches, loops and regions around a node."""

    scope: Scope
    parent: ast.ClassDef | None = None
    branches: tuple[tuple[int, int], ...] = ()
    loops: tuple[ast.AST, ...] = ()
    regions: tuple[Region, ...] = ()
    block: tuple[int, int] = (0, 0)


class _Reader:
    """Reads the scopes of a file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: list[Scope] = []

    def read(self) -> list[Scope]:
        self._scope(self.source.tree)
        return self.found

    def _scope(
        self, node: Function | ast.Module, around: _Around | None = None, regions: tuple[Region, ...] = ()
    ) -> None:
        scope = Scope(node) if around is None else Scope(node, parent=around.parent, outer=around.scope)
        self.found.append(scope)
        self._block(node.body, _Around(scope, regions=regions))

    def _block(self, statements: Sequence[ast.AST], around: _Around) -> None:
        for number, statement in enumerate(statements):
            self._visit(statement, replace(around, block=(id(statements), number)))

    def _visit(self, node: ast.AST, around: _Around) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in node.decorator_list:
                self._visit(decorator, around)
            regions = (self.source.region(decorator) for decorator in node.decorator_list)
            self._scope(node, around, tuple(region for region in regions if region is not None))
            return
        if isinstance(node, ast.ClassDef):
            around = replace(around, parent=node)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            self._children(node, around, but=("body",))
            self._block(node.body, replace(around, loops=(*around.loops, node)))
            return
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            self._with(node, around)
            return
        elif type(node) in _BRANCHES:
            self._branches(node, around)
            return
        self._children(node, around)
        if isinstance(node, ast.Call):
            self._call(node, around)

    def _children(self, node: ast.AST, around: _Around, but: Sequence[str] = ()) -> None:
        for name, value in ast.iter_fields(node):
            if name in but:
                continue
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._block(value, around)
            else:
                for part in value if isinstance(value, list) else (value,):
                    if isinstance(part, ast.AST) and not isinstance(part, _LEAVES):
                        self._visit(part, around)

    def _with(self, node: ast.With | ast.AsyncWith, around: _Around) -> None:
        regions = around.regions
        for item in node.items:
            self._visit(item.context_expr, around)
            region = self.source.region_of(item.context_expr)
            regions = (*regions, region) if region is not None else regions
        self._block(node.body, replace(around, regions=regions))

    def _branches(self, node: ast.AST, around: _Around) -> None:
        """Parts that exclude each other, and what else there is."""
        fields = _BRANCHES[type(node)]
        self._children(node, around, but=fields)
        number = 0
        for name in fields:
            value = getattr(node, name)
            statements = isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)
            for part in [value] if statements or not isinstance(value, list) else value:
                inside = replace(around, branches=(*around.branches, (id(node), number)))
                if statements:
                    self._block(part, inside)
                else:
                    self._visit(part, inside)
                number += 1

    def _call(self, node: ast.Call, around: _Around) -> None:
        calls = around.scope.calls
        name = self.source.resolve(node.func)
        receiver, method = "", name.rpartition(".")[2]
        if isinstance(node.func, ast.Attribute):
            receiver, method = dotted(node.func.value) or ast.unparse(node.func.value), node.func.attr
        calls.append(
            Call(
                node,
                name,
                receiver,
                method,
                len(calls),
                around.branches,
                around.loops,
                around.regions,
                around.block,
            )
        )
