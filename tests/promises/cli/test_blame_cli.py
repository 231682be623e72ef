"""`ampcheck blame TARGET`: 0 where nothing fails, 1 with the culprit and code to paste, 2 for a usage error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import main

from ampcheck import Run, Verdict

TARGETS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, size):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        nn.init.constant_(self.up.weight, 1.0)
        nn.init.uniform_(self.down.weight, size / 2, size)

    def forward(self, x):
        return self.norm(self.down(self.up(x)))

def hot(): return Model(20000.0), torch.ones(2, 8)
def cool(): return Model(1.0), torch.ones(2, 8)
def training(): return {"step": lambda i: 0.0}
"""


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs the command in a folder with `blamed.py`; the import is undone afterwards."""
    (tmp_path / "blamed.py").write_text(TARGETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> Said:
        return Said(main(["blame", *arguments]), *capsys.readouterr())

    yield run
    sys.modules.pop("blamed", None)


QUICK = ("--no-compile", "--no-time", "--dtype", "float16")


def test_a_failure_is_told_with_its_place_and_code_that_mends_it_when_it_is_pasted(blamed: Any) -> None:
    said = blamed("blamed.py:hot", *QUICK)
    assert said.code == 1
    assert "down at blamed.py:14" in " ".join(said.out.split())
    title, _, rest = said.out.partition("\nimport types\n")
    assert "Code that keeps these modules in float32" in title
    space: dict[str, Any] = {}
    exec("import types\n" + rest, space)
    model, x = sys.modules["blamed"].hot()
    with torch.autocast("cpu", torch.float16):
        assert not model(x).isfinite().all()
        assert space["keep_in_float32"](model)(x).isfinite().all()


def test_where_nothing_fails_it_says_so_and_the_code_is_0(blamed: Any) -> None:
    said = blamed("blamed.py:cool", *QUICK, "-v")
    assert said.code == 0
    assert "nothing to blame: eager within" in " ".join(said.out.split())
    assert "import types" not in said.out
    assert all(" done, now: " in line for line in said.err.splitlines())


def test_the_step_time_is_told_unless_it_is_left_out(blamed: Any) -> None:
    assert "x the time of a plain eager step" in " ".join(
        blamed("blamed.py:hot", "--no-compile", "--dtype", "float16").out.split()
    )
    assert "Its cost was not asked for" in " ".join(blamed("blamed.py:hot", *QUICK).out.split())


def test_the_run_is_written_as_json_and_as_a_page(blamed: Any) -> None:
    said = blamed("blamed.py:hot", *QUICK, "--json", "run.json", "--html", "run.html")
    assert said.code == 1
    run = Run.load("run.json")
    assert [f.check for f in run.of(Verdict.FAIL)] == ["blame"]
    assert "keep_in_float32" in Path("run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("blamed.py:training",), "a training subject"),
        (("blamed.py:missing",), "'missing'"),
        (("blamed.py:cool", "--dtype", "float12"), "float12"),
        (("blamed.py:cool", "--dtype", "float64"), "float16, bfloat16, float32"),
        (("blamed.py:cool", "--device", "toaster"), "'toaster' is no device"),
        (("blamed.py:cool", "--runs", "0"), "runs must be a whole number, 1 or more"),
        (("blamed.py:cool", "--json", "nowhere/run.json"), "there is no folder nowhere"),
    ],
)
def test_a_usage_error_is_one_line_and_2(blamed: Any, arguments: tuple[str, ...], said: str) -> None:
    told = blamed(*arguments)
    assert told.code == 2
    assert told.out == ""
    assert told.err.startswith("ampcheck: ")
    assert told.err.count("\n") == 1
    assert said in told.err
