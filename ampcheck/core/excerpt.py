"""Lines of source around a place, with what is at fault underlined, as a compiler shows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ampcheck.core.syntax import parse_python
from ampcheck.core.text import cells, clean, fitting

BEFORE, AFTER = 2, 1
"""Lines of context before and after the line at fault."""

_MANY = 10**9
"""More lines than any file has."""

_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub rsub",
    ast.Mult: "mul",
    ast.Div: "div true_divide",
    ast.FloorDiv: "floor_divide div",
    ast.Mod: "remainder fmod",
    ast.Pow: "pow",
    ast.MatMult: "matmul mm bmm mv dot addmm baddbmm",
    ast.USub: "neg",
    ast.Invert: "bitwise_not logical_not",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Subscript: "index select slice",
}
"""Python's operators, each with the names of the ops that it calls."""

_CALLED = {
    "to_copy": "to half float double bfloat16 long int short char byte bool type type_as",
    "local_scalar_dense": "item tolist float int bool",
    "copy": "copy_ to",
    "convolution": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "addmm": "linear matmul einsum",
    "mm": "linear matmul einsum",
    "bmm": "matmul einsum baddbmm",
    "linalg_vector_norm": "norm normalize clip_grad_norm_",
    "pow": "square float_power",
    "clamp": "clip",
    "clamp_min": "clamp clip",
    "clamp_max": "clamp clip",
    "foreach_norm": "clip_grad_norm_",
    "foreach_mul": "clip_grad_norm_",
    "nll_loss_forward": "cross_entropy",
    "log_softmax": "cross_entropy",
    "embedding_dense": "embedding",
}
"""Ops whose name is not the name by which they are called."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of source without their common indentation; empty where the source is not known.

    first: the number of the first line. line: that of the line at fault, whose characters from `start` up to `end`
    compute what is judged. Raises `ValueError` for numbers that do not fit the lines.
    """

    lines: Sequence[str] = ()
    first: int = 1
    line: int = 1
    start: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        if not self.lines:
            return
        number = self.line - self.first
        if not (1 <= self.first < _MANY and 0 <= number < len(self.lines) and all("\n" not in t for t in self.lines)):
            raise ValueError(f"an excerpt must contain its line {self.line!r:.20}; it begins at {self.first!r:.20}")
        if not 0 <= self.start <= self.end <= len(self.lines[number]):
            raise ValueError(f"an excerpt must mark characters of its line, not {self.start!r:.20} to {self.end!r:.20}")

    def drawn(self, width: int | None = None, note: str = "") -> Iterator[str]:
        """The lines with their numbers, and carets below the line at fault, with `note` behind them where it fits; each
        within `width` columns, by default of any width."""
        gutter = len(str(self.first + len(self.lines) - 1))
        for number, text in enumerate(map(_printable, self.lines), self.first):
            space = None if width is None else max(width - gutter - 3, 2)
            left = self._hidden(text, space) if number == self.line else 0
            yield f"{number:>{gutter}} | {cut(text, space, left)}".rstrip()
            if number == self.line and self.end > self.start:
                carets = cells(text[left : self.start]) * " " + cells(text[self.start : self.end]) * "^"
                noted = (
                    f"{carets} {note}" if note and (space is None or cells(carets) + cells(note) < space) else carets
                )
                yield f"{'':{gutter}} | {noted if space is None else noted[:space]}"

    def _hidden(self, text: str, space: int | None) -> int:
        """Return how many characters at the start of the line at fault make room for what is at fault."""
        if space is None or cells(text[: self.end]) <= space:
            return 0
        return max(0, min(self.start - 1, self.end - space if text.isascii() else self.start - 1))


def _printable(text: str) -> str:
    """A line with escapes for control characters, and a space for each tab, so that carets stand below their text."""
    return clean(text.replace("\t", " "))


def cut(text: str, space: int | None, left: int = 0) -> str:
    """A line from the character `left` on, as far as it fits, with an ellipsis where it was cut."""
    shown = f"…{text[left + 1 :]}" if left else text
    return shown if space is None or cells(shown) <= space else f"{fitting(shown, space - 1)}…"


def excerpt_of(source: Sequence[str], line: int, op: str = "", module: str = "") -> Excerpt:
    """The lines around a line, counted from 1, and where in it `op` or the call of `module` is.

    op: such as `aten::mul.Tensor`. Where neither is found the first character of the line is at fault. Empty for a line
    that the source lacks.
    """
    if not (0 < line <= len(source) and source[line - 1].strip()):
        return Excerpt()
    first, last = max(1, line - BEFORE), min(len(source), line + AFTER)
    lines = [_printable(text.rstrip()) for text in source[first - 1 : last]]
    while not lines[0]:
        first, lines = first + 1, lines[1:]
    while not lines[-1]:
        lines.pop()
    shown = lines[line - first]
    indented = len(shown) - len(shown.lstrip())
    moved = len(shown) != len(source[line - 1].rstrip())  # by escapes
    span = None if moved else _span(source, line, op.partition("::")[2], module)
    start, end = span or (indented, indented + 1)
    common = min(len(text) - len(text.lstrip()) for text in lines if text)
    return Excerpt(tuple(text[common:] for text in lines), first, line, start - common, end - common)


def _span(source: Sequence[str], line: int, op: str, module: str) -> tuple[int, int] | None:
    """The characters of a line that call the op, or else the module; None where they are not known."""
    found = _computing(source, line, op)
    if not found and (part := module.rpartition(".")[2]).isidentifier():
        found = [node for node in _at(source, line) if isinstance(node, ast.Call) and _called(node) == part]
    if not found:
        return None
    text = source[line - 1]
    starts = [_characters(text, column) if first == line else 0 for first, column in map(_start, found)]
    ends = [_characters(text, node.end_col_offset or 0) if node.end_lineno == line else len(text) for node in found]
    start = max(min(starts), len(text) - len(text.lstrip()))
    return start, min(max(ends), len(text.rstrip()))


def name_at(source: Sequence[str], line: int, op: str) -> str:
    """The name by which a line calls an op, such as `square` for `aten::pow.Tensor_Scalar`; empty where the line does
    not call it, or by its own name."""
    op = op.partition("::")[2]
    names = {_called(node) if isinstance(node, ast.Call) else "" for node in _computing(source, line, op)}
    name = names.pop() if len(names) == 1 else ""
    return "" if name.strip("_") == _base(op) else name


def _computing(source: Sequence[str], line: int, op: str) -> list[ast.expr | ast.AugAssign]:
    """The expressions of a line that compute an op, given without its namespace."""
    name = _base(op)
    return [node for node in _at(source, line) if name and _computes(node, name)]


def _at(source: Sequence[str], line: int) -> list[ast.expr | ast.AugAssign]:
    return [node for node in _nodes("".join(source)) if node.lineno <= line <= (node.end_lineno or 0)]


def _base(op: str) -> str:
    return op.partition(".")[0].strip("_").removeprefix("native_").removesuffix("_backward")


def _start(node: ast.expr | ast.AugAssign) -> tuple[int, int]:
    """The line and the column in bytes at which an operation begins: of a method of a result, at its dot."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method, receiver = node.func, node.func.value
        if isinstance(receiver, (ast.Call, ast.Subscript, ast.BinOp, ast.UnaryOp, ast.Compare)):
            return method.end_lineno or 0, (method.end_col_offset or 0) - len(f".{method.attr}".encode())
    return node.lineno, node.col_offset


@lru_cache(maxsize=32)
def _nodes(source: str) -> tuple[ast.expr | ast.AugAssign, ...]:
    """The expressions and augmented assignments of a file; none where it cannot be parsed."""
    tree = parse_python(source)
    return tuple(node for node in ast.walk(tree) if isinstance(node, (ast.expr, ast.AugAssign))) if tree else ()


def _computes(node: ast.expr | ast.AugAssign, name: str) -> bool:
    """Return whether an expression calls the op of this name, without what its operands call."""
    if isinstance(node, ast.Call):
        called = _called(node).strip("_")
        return bool(called) and (name == called or called in _CALLED.get(name, "").split())
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.UnaryOp)):
        return name in _SIGNS.get(type(node.op), "").split()
    if isinstance(node, ast.Compare):
        return any(name in _SIGNS.get(type(sign), "").split() for sign in node.ops)
    return isinstance(node, ast.Subscript) and name in _SIGNS[ast.Subscript].split()


def _called(call: ast.Call) -> str:
    """The name by which a function is called, without what it belongs to."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _characters(text: str, offset: int) -> int:
    """The number of characters in the first `offset` bytes of a line in UTF-8, as ast counts them."""
    return len(text.encode()[:offset].decode(errors="ignore"))
