"""Promise: .github/SECURITY.md says of every command whether it runs code, and those that run none run none."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.cli.main import _parser
from ampcheck.core.run import Run, Where

ROOT = Path(__file__).parents[3]
PAGE = ROOT / ".github" / "SECURITY.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the page is not in this copy of the tests")

COMMAND = """
import sys

def watch(event, arguments):
    if event == "pickle.find_class" or (event == "import" and arguments[0] in ("torch", "trap")):
        open("seen", "a").write(f"{event} {arguments[0]}\\n")

sys.addaudithook(watch)
from ampcheck.__main__ import run
run()
"""
"""The command `ampcheck`, which notes imports of PyTorch and of the user's module, and classes out of pickles."""

TRAP = 'open("seen", "a").write("the trap ran\\n")\nfrom torch.cuda.amp import autocast\n\ndef subject():\n    pass\n'

QUIET = [
    *("lint .", "lint . --fix", "lint . --sarif o.sarif --html o.html --json o.json --markdown o.md"),
    *("known", "known torch", "known --json", "known --schema", "known --fail-if-used ."),
    *("show run.json", "show run.json finding 1", "show run.json --json", "show run.json module m"),
    *("report run.json", "report run.json run.json", "report --compare run.json run.json", "report --schema"),
    "report run.json --sarif o.sarif --html o.html --json o.json --markdown o.md",
    *("explain", "explain overflow", "explain AMP101", "formats", "guide"),
]


def commands_of(title: str) -> list[str]:
    """The commands in the first column of the table of a section."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_every_command_is_listed_once() -> None:
    (commands,) = [one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction)]
    assert sorted(commands_of("What runs code") + commands_of("What never runs code")) == sorted(commands.choices)


def test_every_command_that_runs_nothing_is_tried() -> None:
    assert {words.split()[0] for words in QUIET} == set(commands_of("What never runs code"))


def seen(folder: Path, words: str) -> tuple[int, str]:
    """The exit code of a command in a folder of traps, and what they and the hook noted."""
    (folder / "here").mkdir()
    for name in ("trap", "torch", "rich", "conftest", "sitecustomize"):
        (folder / "here" / f"{name}.py").write_text(TRAP, encoding="utf-8")
    (folder / "here/pyproject.toml").write_text('[tool.ampcheck]\ntargets = ["trap.py:subject"]\n', encoding="utf-8")
    Run(findings=(OVERFLOW.fail("m", "too large", where=Where(module="m")),), title="m").save(folder / "here/run.json")
    (folder / "command.py").write_text(COMMAND, encoding="utf-8")
    command = [sys.executable, str(folder / "command.py"), *words.split()]
    done = subprocess.run(command, cwd=folder / "here", capture_output=True, text=True, timeout=120, check=False)
    noted = folder / "here/seen"
    return done.returncode, noted.read_text(encoding="utf-8") if noted.exists() else ""


@pytest.mark.parametrize("words", QUIET)
def test_a_command_that_only_reads_imports_neither_pytorch_nor_a_target_and_unpickles_nothing(
    tmp_path: Path, words: str
) -> None:
    code, noted = seen(tmp_path, words)
    assert (code in (0, 1), noted) == (True, "")


def test_the_traps_work(tmp_path: Path) -> None:
    assert "the trap ran" in seen(tmp_path, "audit --fast")[1]
