"""The dtypes of values of a function, as far as its casts and autocast regions say them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ampcheck.core.syntax import dotted
from ampcheck.lint.source import HALF, Call, Region, Scope, Source, own_nodes

_OTHER = "other"
"""Any dtype but float16, in place of its name."""

_CASTS = {"half": "torch.float16", "bfloat16": _OTHER, "float": _OTHER, "double": _OTHER}

_PRODUCTS = frozenset(("matmul", "mm", "bmm", "einsum", "linear", "baddbmm", "addmm", "conv1d", "conv2d"))
"""Functions that autocast runs in 16 bits, as it does `@`."""

_WIDE = frozenset(("softmax", "log_softmax", "exp", "log", "pow", "sum", "cumsum", "norm", "layer_norm"))
"""Functions that autocast runs in float32."""

_NO_FLOAT = frozenset(("bool", "int", "long", "eq", "ne", "lt", "le", "gt", "ge", "full"))
"""Functions and methods whose result has the dtype of no argument."""

_VIEWS = frozenset(("T", "mT", "data"))
_ASKS = re.compile(r"dtype|half|float16|fp16|finfo")
"""A branch that chooses by the precision."""


class Dtypes:
    """The dtypes of values of one function; a name has that of the last line before its use that binds it."""

    def __init__(self, source: Source, scope: Scope) -> None:
        self._source = source
        self._calls = {id(call.node): call for call in scope.calls}
        self._values = defaultdict[str, list[ast.expr]](list, {"": []})
        self._regions: list[tuple[int, int, Region]] = []
        for node in own_nodes(scope.node):
            for target, value in _bound(node):
                self._values[dotted(target)].append(value)
            contexts: Iterable[ast.expr] = getattr(node, "decorator_list", ())
            if isinstance(node, (ast.With, ast.AsyncWith)):
                contexts = [item.context_expr for item in node.items]
            for region in filter(None, map(source.region_of, contexts)):
                self._regions.append((getattr(node, "lineno", 0), getattr(node, "end_lineno", 0), region))
        del self._values[""]  # what is no name, such as an item

    def is_half(self, call: Call) -> bool:
        """Return whether the result of a call is float16, and no branch around it asks for a dtype."""
        statements = (self._source.nodes[identity] for identity, _ in call.branches)
        tests = (ast.unparse(node.test) for node in statements if isinstance(node, (ast.If, ast.IfExp)))
        return not any(map(_ASKS.search, tests)) and self._of(call.node, call, call.line) in HALF

    def _of(self, node: ast.AST, at: Call, before: int) -> str:
        """The dtype of an expression; "" where nothing says it. at: the call that is judged. before: the line up to
        which names are bound."""
        if isinstance(node, ast.Call):
            return self._of_call(node, at, before)
        if isinstance(node, ast.BinOp):
            product = isinstance(node.op, ast.MatMult) and self._is_autocast(node)
            return "torch.float16" if product else self._promoted((node.left, node.right), at, before)
        bound = self._values.get(dotted(node), ())
        values = [value for value in bound if value.lineno < before and not self._misses(value, at)]
        if values:
            last = max(values, key=lambda value: value.lineno)
            return self._of(last, at, last.lineno)
        if isinstance(node, (ast.Subscript, ast.Starred)) or (isinstance(node, ast.Attribute) and node.attr in _VIEWS):
            return self._of(node.value, at, before)
        return self._of(node.operand, at, before) if isinstance(node, ast.UnaryOp) else ""

    def _of_call(self, node: ast.Call, at: Call, before: int) -> str:
        name, method = self._source.resolve(node.func), getattr(node.func, "attr", "")
        if (cast := self._cast(node, method, at, before)) is not None:
            return cast
        called = method or name.rpartition(".")[2]
        if called in _NO_FLOAT:
            return ""
        if called in (_PRODUCTS | _WIDE) and self._is_autocast(node):
            return "torch.float16" if called in _PRODUCTS else _OTHER
        if name.startswith("torch."):
            return self._promoted(node.args, at, before)
        if not isinstance(node.func, ast.Attribute):
            return ""
        return self._promoted((node.func.value, *(node.args[1:] if method == "where" else ())), at, before)

    def _cast(self, node: ast.Call, method: str, at: Call, before: int) -> str | None:
        """The dtype that a call names; None of one that names none."""
        if method in _CASTS and not node.args:
            return _CASTS[method]
        named = [keyword.value for keyword in node.keywords if keyword.arg == "dtype"]
        for value in (*named, *(node.args if method in ("to", "type", "type_as") else ())):
            dtype = self._source.resolve(value)
            if dtype in HALF:
                return dtype
            if dtype.startswith("torch.") and "device" not in dtype:
                return _OTHER
            if not isinstance(value, ast.Constant) and "device" not in dtype:  # `x.to(y)` and `x.to(y.dtype)`
                return self._of(value.value if dtype.endswith(".dtype") else value, at, before)
        return None

    def _promoted(self, nodes: Iterable[ast.AST], at: Call, before: int) -> str:
        dtypes = [self._of(node, at, before) for node in nodes]
        return _OTHER if _OTHER in dtypes else next(filter(None, dtypes), "")

    def _misses(self, value: ast.expr, at: Call) -> bool:
        """Return whether a value is bound in a branch that excludes the call."""
        calls = (self._calls[id(node)] for node in ast.walk(value) if id(node) in self._calls)
        return any(call.excludes(at) for call in calls)

    def _is_autocast(self, node: ast.expr) -> bool:
        """Return whether the innermost autocast region around an expression casts to float16."""
        around = [(start, region) for start, end, region in self._regions if start <= node.lineno <= end]
        return bool(around) and max(around, key=lambda one: one[0])[1].is_half


def _bound(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The names that a statement binds, with their values; of several without a value each, the whole."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        targets, value = [node.target], node.value
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        targets, value = [node.target], node.iter
    else:
        return
    for target in targets:
        names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(names) else None
        yield from zip(names, values or [value] * len(names), strict=True)
