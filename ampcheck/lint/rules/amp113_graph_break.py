"""Requires: A compiled function reads no number from a tensor: .item(), .tolist(), .numpy() and branches on values
break the graph, so that what was to be one kernel is several, with a synchronisation between them.

Measured: In a function that torch.compile decorates, or that is handed to it by name in the same file, a call of
.item(), .tolist() or .numpy(), or an if or while whose test calls .any(), .all(), .item() or isnan().

Causes: Logging, assertions and early exits in the compiled region.

Fix: torch.where and torch.cond in place of a branch; read numbers outside.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.rule import Report, Rule
from ampcheck.lint.source import Scope, Source

_READS = ("item", "tolist", "numpy")
_TESTS = (".any()", ".all()", ".isnan()", ".isinf()")


def _read(source: Source) -> Iterator[Report]:
    handed = {
        (scope, call.node.args[0].id)
        for scope in source.scopes
        for call in scope.calls
        if call.name == "torch.compile" and call.node.args and isinstance(call.node.args[0], ast.Name)
    }
    for scope in source.scopes:
        if _is_compiled(source, scope, handed):
            yield from _breaks(scope)


def _is_compiled(source: Source, scope: Scope, handed: set[tuple[Scope, str]]) -> bool:
    """Return whether a function is decorated, or handed over in the scope that defines it."""
    if isinstance(scope.node, ast.Module) or scope.outer is None:
        return False
    decorators = [d.func if isinstance(d, ast.Call) else d for d in scope.node.decorator_list]
    return "torch.compile" in map(source.resolve, decorators) or (scope.outer, scope.node.name) in handed


def _breaks(scope: Scope) -> Iterator[Report]:
    seen: set[int] = set()
    for call in scope.of(*_READS):
        if not call.node.args and call.line not in seen and call.receiver not in ("np", "self"):
            seen.add(call.line)
            yield Report(call.line, f"{call.receiver[:40]}.{call.method}() breaks the compiled graph")
    for node in ast.walk(scope.node):
        if isinstance(node, (ast.If, ast.While)) and node.lineno not in seen:
            test = ast.unparse(node.test)
            if any(part in test for part in _TESTS):
                yield Report(node.lineno, f"a branch on values of a tensor, {test[:50]}, breaks the compiled graph")


RULE = Rule(
    Check("AMP113", "lint", __doc__),
    (("torch.compile",), (".item(", ".tolist(", ".numpy(", ".any()", ".all()", "isnan")),
    _read,
    fails=False,
    patterns=(r"@\s*torch\.compile|torch\.compile\(\s*\w+\s*[,)]",),
    audit="ampcheck audit model.py:subject --checks graph-break",
)
