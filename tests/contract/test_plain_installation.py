"""A plain `pip install ampcheck` has all that the package imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import ampcheck

MODULES = {"hypothesis", "jinja2", "markupsafe", "numpy", "packaging", "pytest", "rich", "tomli", "torch"}
"""What the required packages install; jinja2 brings markupsafe."""

OWN = {
    "PIL", "diffusers", "huggingface_hub", "lightning", "pytorch_lightning", "tensorboard", "timm", "torchvision",
    "transformers", "triton", "wandb",
}  # fmt: skip
"""What a repository has that uses their callbacks, writers, models or kernels."""

PLACES = ("architectures/", "callbacks/", "health/", "setup/", "tools/lab/")
"""The packages that may import these."""


def imported(node: ast.AST) -> Iterator[str]:
    """The top-level modules that code imports, except what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        if isinstance(child, ast.ImportFrom):
            yield str(child.module).partition(".")[0]
        yield from imported(child)


def foreign(source: str) -> set[str]:
    return set(imported(ast.parse(source))) - {"ampcheck", "_pytest", *sys.stdlib_module_names, "tomllib"}


def test_nothing_else_is_imported() -> None:
    package = Path(ampcheck.__file__).parent
    for path in package.rglob("*.py"):
        is_place = path.relative_to(package).as_posix().startswith(PLACES)
        unknown = foreign(path.read_text(encoding="utf-8")) - MODULES - (OWN if is_place else set())
        assert not unknown, path


def test_an_import_within_a_function_is_seen() -> None:
    assert foreign("import os\ndef f():\n    from scipy import stats") == {"scipy"}
