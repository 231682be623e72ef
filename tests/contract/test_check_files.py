"""A check is one file: what its page, declaration, function, example, test and evidence must have in common."""

from __future__ import annotations

import ast
import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import examples
import pytest

import ampcheck.checks
from ampcheck.compiled.accuracy import checks as accuracy
from ampcheck.compiled.graph import checks as graphs
from ampcheck.core.check import SECTIONS, Check, sections
from ampcheck.speed.matrix import accuracy as matrix
from ampcheck.training import judge, judge_running
from ampcheck.training.monitor import judge as monitor

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(p for p in (ROOT / "ampcheck" / "checks").glob("*/*.py") if p.name[0] != "_")
LEDGER = json.loads((ROOT / "reports" / "evidence" / "ledger.json").read_text(encoding="utf-8"))["rows"]
of_each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def module_of(path: Path) -> ModuleType:
    return importlib.import_module(f"ampcheck.checks.{path.parent.name}.{path.stem}")


@of_each_file
def test_a_file_declares_the_check_that_it_is_named_by(path: Path) -> None:
    check = module_of(path).CHECK
    assert isinstance(check, Check)
    assert check.slug.replace("-", "_") == path.stem
    assert check.family == path.parent.name
    assert ampcheck.checks.REGISTRY[check.slug] is check
    assert check.order < 1000, "what other packages add comes last"


@of_each_file
def test_the_docstring_is_the_page_and_nothing_else(path: Path) -> None:
    page = module_of(path).__doc__ or ""
    assert tuple(sections(page)) == SECTIONS
    paragraphs = page.strip().split("\n\n")
    assert [paragraph.partition(":")[0] for paragraph in paragraphs] == list(SECTIONS)


@of_each_file
def test_the_function_takes_the_records_that_the_declaration_names(path: Path) -> None:
    module = module_of(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    records = {name for f in functions for name in ast.unparse(f.args.args[0].annotation or f).split(" | ")}
    assert records == set(module.CHECK.needs)
    assert all(len(f.args.args) == 2 for f in functions)


@of_each_file
def test_a_check_has_a_test_and_an_example(path: Path) -> None:
    slug = module_of(path).CHECK.slug
    assert (ROOT / "tests" / "units" / "checks" / path.parent.name / f"test_{path.stem}.py").exists()
    assert slug in examples.WITHOUT or {"failing.py", "mended.py", "finding.txt"} <= {
        file.name for file in (examples.HERE / slug).iterdir()
    }


@of_each_file
def test_the_check_speaks_in_the_cases_that_it_names_as_evidence(path: Path) -> None:
    check = module_of(path).CHECK
    heard = [(row["case"], f[0]) for row in LEDGER for arm in row["arms"].values() for f in arm.get("findings", ())]
    spoken = {case for case, slug in heard if slug == check.slug}
    assert set(check.evidence) <= spoken
    elsewhere = ("docs/examples/", "../shared/")  # its own example, and what no clone has
    assert check.evidence or all(case.startswith(elsewhere) for case in spoken), "the ledger has cases of it"


def test_no_check_imports_torch() -> None:
    statement = "from ampcheck.checks import REGISTRY; list(REGISTRY); import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", statement], check=True, timeout=120)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_files_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of equal order are swapped by it: all that counts is the declared order, and then the name."""
    shuffled = list(ampcheck.checks._own())
    random.Random(seed).shuffle(shuffled)
    before = list(ampcheck.checks.registered())
    monkeypatch.setattr(ampcheck.checks, "_own", lambda: tuple(shuffled))
    assert list(ampcheck.checks.registered.__wrapped__()) == before
    orders = [check.order for check in ampcheck.checks.REGISTRY.values()]
    assert orders == sorted(orders)


def test_checks_that_code_names_are_there() -> None:
    files = (ROOT / "ampcheck").rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    asked = [node.slice for node in nodes if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "REGISTRY"]
    named = {node.value for node in asked if isinstance(node, ast.Constant)}
    assert named
    listed = {*judge.CHECKS, *judge_running.OBSERVED, *monitor.MONITORED}
    listed |= {*accuracy.CHECKS, *graphs.GRAPH_CHECKS, *matrix.VALUES, *matrix.COMPILED}
    assert {*named, *listed} <= set(ampcheck.checks.REGISTRY)
