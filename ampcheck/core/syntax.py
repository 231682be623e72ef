"""Files of Python as syntax trees: nothing of them is imported."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator


def parse_python(source: str | bytes) -> ast.Module | None:
    """The tree of a file; None of one that is no Python, or nests too deeply to be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in the strings of others
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def dotted(node: ast.AST | None) -> str:
    """`self.scaler.step` of the expression that is written so; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def statements_in(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement of a file in order, and the handlers and cases that contain some; no expression is entered."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        yield (node := nodes.pop())
        fields = (getattr(node, name, ()) for name in ("body", "handlers", "orelse", "finalbody", "cases"))
        inner = [part for field in fields if isinstance(field, list) for part in field]  # of a lambda it is none
        nodes += reversed(inner)


def imported_names(tree: ast.Module, package: Callable[[ast.ImportFrom], str]) -> Iterator[tuple[str, str]]:
    """The names that imports anywhere in a file make, with what they stand for: `nn` and `torch.nn`.

    package: of a relative import.
    """
    for node in statements_in(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            origin = package(node) if node.level else node.module
            for alias in node.names:
                yield alias.asname or alias.name, f"{origin}.{alias.name}"
