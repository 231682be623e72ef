"""Requires: What is added up over steps or batches is added up in float32: a sum in bfloat16 stops growing at 256 times
its addend, one in float16 at 2048 times.

Measured: A name is bound to zeros in 16 bits, and += adds to it in a loop of the same function that
does not reset it.

Causes: zeros_like of a 16-bit loss; a metric in the dtype of the model.

Fix: torch.zeros((), dtype=torch.float32), or add up loss.item().
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ampcheck.core.check import Check
from ampcheck.core.syntax import dotted
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import NARROW, Source, own_nodes

_MADE = ("zeros", "tensor", "zeros_like", "new_zeros")


def _read(source: Source) -> Iterator[Report]:
    for scope in source.scopes:
        nodes, reported = list(own_nodes(scope.node)), set[str]()
        zeros = list(_zeros(source, nodes))
        for loop in (node for node in nodes if zeros and isinstance(node, (ast.For, ast.While))):
            for node in own_nodes(loop):
                if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add):
                    continue
                name = dotted(node.target)
                lines = [line for made, line in zeros if made == name]
                is_reset = any(loop.lineno <= line <= (loop.end_lineno or line) for line in lines)
                if lines and not is_reset and name not in reported:
                    reported.add(name)
                    yield Report(node.lineno, f"{name} is in 16 bits (line {min(lines)}) and stops growing")


def _zeros(source: Source, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the names of 16-bit zeros, and their lines."""
    for part in nodes:
        if not isinstance(part, ast.Assign) or not isinstance(part.value, ast.Call) or len(part.targets) != 1:
            continue
        call, name = part.value, dotted(part.targets[0])
        made = source.resolve(call.func).rpartition(".")[2] in _MADE
        if name and made and any(k.arg == "dtype" and source.is_narrow(k.value, NARROW) for k in call.keywords):
            yield name, part.lineno


RULE = Rule(
    Check("AMP112", "lint", __doc__),
    (("half", "float16"), ("+=",), ("zeros", "tensor(")),
    _read,
    audit="ampcheck audit train.py:main --checks stagnation,precision-loss",
    patterns=(r"= *[\w.]*(zeros|tensor|zeros_like)\([\s\S]{0,200}?dtype\s*=\s*torch\.(half|b?float16)",),
)
