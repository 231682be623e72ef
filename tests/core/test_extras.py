"""What a plain `pip install ampcheck` can do, and the sentence where it cannot."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ampcheck
from ampcheck.callbacks.base import WatchCallback
from ampcheck.cli.main import main
from ampcheck.core.errors import UsageError
from ampcheck.core.extras import EXTRAS

PACKAGE = Path(ampcheck.__file__).parent
MODULES = {"hypothesis", "jinja2", "markupsafe", "numpy", "pytest", "rich", "tomli", "torch", "triton"}
"""What the required packages install; jinja2 brings markupsafe."""
FRAMEWORKS = {"huggingface_hub", "lightning", "pytorch_lightning", "transformers"}
"""What a repository has that uses their callbacks or models."""
SENTENCE = "{} needs matplotlib, which is not installed: pip install 'ampcheck[report]'"


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
    return set(imported(ast.parse(source))) - {"ampcheck", *sys.stdlib_module_names}


def test_the_package_imports_nothing_but_what_is_required_and_the_extras() -> None:
    extras = {module for modules in EXTRAS.values() for module in modules}
    used = {path: foreign(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert not {str(path): names for path, names in used.items() if names - MODULES - FRAMEWORKS - extras}
    assert set().union(*used.values()) >= extras, "an extra that nothing imports"
    drawing = {path.parent.name for path, names in used.items() if names & extras}
    assert drawing == {"report"}, "the only folder that is guarded by require_extra"


def test_an_import_within_a_function_is_seen() -> None:
    assert foreign("import os\ndef f():\n    from scipy import stats") == {"scipy"}


def test_the_extras_are_those_of_pyproject() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    for extra, modules in EXTRAS.items():
        line = re.search(rf"^{extra} = \[(.*)\]", text, re.MULTILINE)
        assert line is not None
        assert re.findall(r"[\w-]+(?=>=)", line[1]) == list(modules)
        assert f'"ampcheck[{extra}]"' in (re.search(r"^all = \[.*\]", text, re.MULTILINE) or [""])[0]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """This interpreter without the extras."""
    for name in {name for modules in EXTRAS.values() for name in modules}:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    "command", ["audit absent.py:f", "lab ulp", "blame absent.py:f", "speed absent.py:f", "history ."]
)
def test_a_page_that_could_not_be_drawn_is_refused_before_the_work(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the target is loaded: the error is not that it is absent."""
    page = tmp_path / "page.html"
    assert main([*command.split(), "--html", str(page)]) == 2
    assert SENTENCE.format("--html") in " ".join(capfd.readouterr().err.split())
    assert not page.exists()


@pytest.mark.usefixtures("plain")
def test_pytest_refuses_it_as_well(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest("-n0", "--ampcheck-html=page.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {SENTENCE.format('--ampcheck-html').replace('[', '[[]')}"])


@pytest.mark.usefixtures("plain")
def test_and_so_do_the_callbacks() -> None:
    with pytest.raises(UsageError, match=re.escape(SENTENCE.format("html="))):
        WatchCallback(html="page.html")
    WatchCallback(json="run.json")


@pytest.mark.usefixtures("plain")
def test_all_else_works_without_the_extras(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "ulp", "--json", str(tmp_path / "run.json")]) == 0
    assert "ulp" in capfd.readouterr().out
    run: Any = ampcheck.Run.load(tmp_path / "run.json")
    assert run.charts
