"""The Python files of a repository as syntax trees; nothing of it is imported."""

from __future__ import annotations

import ast
import keyword
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

from ampcheck.core.syntax import imported_names, parse_python

_SKIPPED = frozenset(
    {"node_modules", "site-packages", "build", "dist", "venv", "env", "__pycache__", "third_party", "vendor"}
)
_FILES = 5_000
"""Python files that are read at most, in the order of their paths."""

_BYTES = 2_000_000
"""A longer file is data."""

_FENCE = re.compile(r"^```(?:python|py)\s*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Source:
    """A parsed file. path: relative to the repository, with slashes. root: the folder that must be on `sys.path` to
    import it, relative too ("" for the repository's own). module: its dotted name from there, "" of an example."""

    path: str
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False)
    root: str = ""
    module: str = ""

    @property
    def is_test(self) -> bool:
        """True if the file belongs to the tests."""
        name = self.path.rpartition("/")[2]
        folders = self.path.split("/")[:-1]
        return (
            name.startswith("test_") or name in ("conftest.py", "setup.py") or {"tests", "test"} & set(folders) != set()
        )

    @property
    def has_importable_name(self) -> bool:
        """True if an import statement can name the module; it cannot for `my-model.py` and `01_train.py`."""
        return all(part.isidentifier() and not keyword.iskeyword(part) for part in self.module.split("."))

    @property
    def takes_datasets(self) -> bool:
        """True if the file takes datasets from torchvision."""
        return "torchvision.datasets." in self.text or any(
            f"{origin}.".startswith("torchvision.datasets.") for origin in self.names.values()
        )

    @cached_property
    def names(self) -> dict[str, str]:
        """Full name of each imported name: `GPT` -> `model.GPT`, `nn` -> `torch.nn`."""
        return dict(imported_names(self.tree, self._absolute))

    def _absolute(self, node: ast.ImportFrom) -> str:
        is_package = self.path.endswith("__init__.py")
        parts = self.module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


@dataclass(frozen=True, slots=True)
class Attempt:
    """A construction of a model.

    code: the expression. setup: statements before it, such as those that fill a configuration. imports: lines that both
    need. inputs: the arguments of a call of the model, as a tuple or a
    mapping, "" where they are proposed from the model. origin: where it comes from, in words.
    """

    code: str
    imports: tuple[str, ...]
    inputs: str = ""
    origin: str = ""
    setup: tuple[str, ...] = ()


def read_sources(folder: Path) -> list[Source]:
    """Every Python file that can be parsed, outside of hidden folders, environments and builds."""
    sources = [_read(folder, path) for path in islice(files_of(folder, (".py",), _BYTES), _FILES)]
    return [source for source in sources if source is not None]


def read_readme(folder: Path) -> str:
    """The text of the README, "" without one."""
    found = (path for path in sorted(folder.glob("README*")) if path.suffix.lower() == ".md" and path.is_file())
    path = next(found, None)
    return path.read_text(encoding="utf-8", errors="replace") if path is not None else ""


def read_examples(folder: Path) -> list[Source]:
    """The blocks of Python in the README, each as a source of its own."""
    trees = [
        (block, tree) for block in _FENCE.findall(read_readme(folder)) if (tree := parse_python(block)) is not None
    ]
    return [Source("README.md", block, tree) for block, tree in trees]


def files_of(folder: Path, endings: tuple[str, ...], size: int) -> Iterator[Path]:
    """The files with these endings and no more bytes, outside of hidden folders, environments and builds."""
    for parent, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        for name in sorted(files):
            path = Path(parent, name)
            if name.endswith(endings) and path.is_file() and path.stat().st_size <= size:
                yield path


def _read(folder: Path, path: Path) -> Source | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    tree = parse_python(text)
    if tree is None:
        return None
    root = path.parent
    while root != folder and (root / "__init__.py").is_file():
        root = root.parent
    is_relative = any(isinstance(node, ast.ImportFrom) and node.level for node in tree.body)
    if is_relative and root == path.parent != folder:
        root = root.parent  # a package without __init__.py
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    where = root.relative_to(folder).as_posix()
    return Source(path.relative_to(folder).as_posix(), text, tree, "" if where == "." else where, ".".join(parts))
