"""Promises are tested through public names: what a user cannot import, a file under tests/promises does not either."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ampcheck

TESTS = Path(__file__).parents[1]
STABILITY = (TESTS.parent / "docs" / "guides" / "stability.md").read_text(encoding="utf-8")
(DECLARED,) = re.findall(r"import from\s+((?:`[\w.]+`(?:, | and )?)+)", STABILITY)
MODULES = {f"ampcheck.{name.removeprefix('ampcheck.')}" for name in re.findall(r"`([\w.]+)`", DECLARED)} | {
    "ampcheck.demo"  # what `ampcheck audit` judges without a target
}
HARNESS = "harness"
"""The one helper of promises that may reach for internals."""

FILES = sorted((TESTS / "promises").rglob("*.py"))
HELPERS = {
    path.stem: path for path in TESTS.rglob("*.py") if not path.stem.startswith(("test_", "conftest", "__init__"))
}


def internals(tree: ast.AST) -> Iterator[str]:
    """Internal modules and names that the code imports, or names in the text of `monkeypatch.setattr`."""
    for name in imported(tree):
        module, _, last = name.rpartition(".")
        of_package = module == "ampcheck" and last in (*ampcheck.__all__, "__version__")
        public = name == "ampcheck" or of_package or any(f"{name}.".startswith(f"{public}.") for public in MODULES)
        if name.partition(".")[0] == "ampcheck" and not public:
            yield name


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            yield from (text.value for text in node.args[:1] if isinstance(text, ast.Constant))


def helpers_of(path: Path) -> set[Path]:
    """The helpers that a file imports, and those that they import."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        tree = ast.parse(waiting.pop().read_text(encoding="utf-8"))
        names = {part for name in imported(tree) for part in name.split(".")} - {HARNESS}
        new = {HELPERS[name] for name in names & HELPERS.keys()} - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_a_promise_is_tested_through_public_names(path: Path) -> None:
    for file in (path, *helpers_of(path)):
        assert not set(internals(ast.parse(file.read_text(encoding="utf-8")))), file


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import ampcheck.core.run", ["ampcheck.core.run"]),
        ("from ampcheck.core.run import Run", ["ampcheck.core.run.Run"]),
        ("from ampcheck import core", ["ampcheck.core"]),
        ("def f():\n    from ampcheck.audit import audit", ["ampcheck.audit.audit"]),
        ("monkeypatch.setattr('ampcheck.audit.judge', None)", ["ampcheck.audit.judge"]),
        ("import ampcheck\nfrom ampcheck import Run\nfrom ampcheck.search import Shift\nimport torch", []),
    ],
)
def test_an_internal_name_is_seen(code: str, found: list[str]) -> None:
    assert list(internals(ast.parse(code))) == found


def test_the_public_modules_are_those_of_the_page() -> None:
    assert {"ampcheck.parity", "ampcheck.callbacks", "ampcheck.setup"} <= MODULES
    assert len(FILES) > 60
