"""Lines of tests that compare results: what they compute is read by assertions alone."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ampcheck.core.syntax import parse_python


def is_compared(path: Path, line: int) -> bool:
    """Return whether the statement at a line is an assertion, or assigns names of a function that only such statements
    read.

    An assertion is `assert`, or a call of what has that in its name: `self.assertLess`, `torch.testing.assert_close`.
    """
    statements = _statements(path)
    at_line = [pair for pair in statements if _covers(pair[1], line)]
    if not at_line:
        return False
    function, statement = max(at_line, key=lambda pair: pair[1].lineno)
    within = [other for owner, other in statements if owner is function]
    return _is_compared(statement, within if isinstance(function, ast.FunctionDef) else ())


def _is_compared(statement: ast.stmt, within: Collection[ast.stmt], seen: frozenset[str] = frozenset()) -> bool:
    if _asserts(statement):
        return True
    names = _names(statement, ast.Store) - seen if isinstance(statement, (ast.Assign, ast.AnnAssign)) else set()
    readers = [other for other in within if other is not statement and names & _names(other, ast.Load)]
    return bool(readers) and all(_is_compared(reader, within, seen | names) for reader in readers)


def _asserts(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return "assert" in name.lower()
    return isinstance(statement, ast.Assert)


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, context)}


def _covers(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


@lru_cache(maxsize=32)
def _statements(path: Path) -> list[tuple[ast.AST, ast.stmt]]:
    """The statements of a file that contain no others, each with the innermost function around it, or the module."""
    with suppress(OSError):
        if (tree := parse_python(path.read_bytes())) is not None:
            return list(_inside(tree, tree))
    return []


def _inside(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.AST, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        owner = child if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if isinstance(child, ast.stmt) and not hasattr(child, "body"):
            yield owner, child
        else:
            yield from _inside(child, owner)
