"""Requires: Positions, timesteps and indices are whole numbers of a format that has them: bfloat16 has all up to 256,
float16 up to 2048, and beyond these neighbours become equal.

Measured: torch.arange that is made in or cast to 16 bits, unless its end is a literal that the format has.

Causes: dtype=x.dtype written out; a model whose buffers were cast.

Fix: Make them in float32 or int64, and cast what is computed from them: sines, embeddings.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import HALF, NARROW, Source, number_of

_LARGEST = {"torch.bfloat16": 256.0} | dict.fromkeys(HALF, 2048.0)


def _read(source: Source) -> Iterator[Report]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            dtype, made = _made(source, node)
            if dtype in NARROW and made is not None and _end(made) > _LARGEST[dtype]:
                message = f"whole numbers beyond {_LARGEST[dtype]:.0f} are not all in {dtype.removeprefix('torch.')}"
                yield Report(node.lineno, message)


def _made(source: Source, node: ast.Call) -> tuple[str, ast.Call | None]:
    """The dtype of an arange, and its call."""
    if source.resolve(node.func) == "torch.arange":
        dtype = next((keyword.value for keyword in node.keywords if keyword.arg == "dtype"), None)
        return source.resolve(dtype), node
    inner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if not isinstance(inner, ast.Call) or source.resolve(inner.func) != "torch.arange":
        return "", None
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method in ("half", "bfloat16"):
        return f"torch.{method}", inner
    values = (*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "dtype"))
    return next((source.resolve(v) for v in values if method in ("to", "type") and source.is_narrow(v)), ""), inner


def _end(call: ast.Call) -> float:
    """The end of a range; infinite where it is not known."""
    end = number_of(call.args[min(1, len(call.args) - 1)]) if call.args else None
    return float("inf") if end is None else abs(end)


RULE = Rule(
    Check("AMP111", "lint", __doc__),
    (("arange(",), ("half", "float16")),
    _read,
    audit="ampcheck audit model.py:subject --checks precision-loss",
    patterns=(r"torch\.arange\([\s\S]{0,200}?(\.half\(|\.bfloat16\(|torch\.(half|b?float16))",),
)
