"""Requires: An eps is a number of the format that it is added in: below 6e-8 it is zero in float16, and the division or
logarithm that it guards is that of zero.

Measured: A literal below 2**-25 that is added to, or clamps, an expression that ends in .half() or
.to(torch.float16), or is the eps of an Adam that is built from a model cast to float16.

Causes: Defaults of float32: 1e-8, 1e-12.

Fix: An eps of 1e-4 to 1e-6, or compute in float32.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import HALF, Source, number_of

_SMALLEST = 2.0**-25
"""Largest number that rounds to zero in float16: half its smallest subnormal number."""


def _read(source: Source) -> Iterator[Report]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for eps, other in ((node.left, node.right), (node.right, node.left)):
                if _vanishes(eps) and _is_half(source, other):
                    yield Report(
                        node.lineno, f"{ast.unparse(eps)} is zero in float16, which {ast.unparse(other):.40} has"
                    )
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("clamp", "clamp_min")
        ):
            bounds = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "min")]
            for bound in bounds:
                if _vanishes(bound) and _is_half(source, node.func.value):
                    yield Report(node.lineno, f"{ast.unparse(bound)} is zero in float16: it clamps nothing")


def _vanishes(node: ast.AST) -> bool:
    value = number_of(node)
    return value is not None and 0 < value <= _SMALLEST


def _is_half(source: Source, node: ast.AST) -> bool:
    """Return whether an expression is cast to float16 at its end."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "half" and not node.args:
        return True
    values = (*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "dtype"))
    return node.func.attr in ("to", "type") and any(source.is_narrow(value, HALF) for value in values)


RULE = Rule(
    Check("AMP109", "lint", __doc__),
    (("half()", "float16", "torch.half"), ("e-",)),
    _read,
    audit="ampcheck audit model.py:subject --dtype float16 --checks silent-zero,overflow",
    patterns=(r"(\.half\(\)|float16\)|half\))[\s)]*(\+|\.clamp)|\de-\d+\s*\+", r"\d(\.\d*)?e-(0?[89]|[1-9]\d)"),
)
