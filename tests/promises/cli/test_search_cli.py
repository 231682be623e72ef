"""`ampcheck search TARGET`: 0 where nothing breaks, 1 with the smallest input that breaks it, 2 for usage errors."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import main

from ampcheck import Run, Verdict

TARGETS = """
import torch
from torch import nn

class Softmax(nn.Module):
    def forward(self, x):
        e = x.exp()
        return e / e.sum(-1, keepdim=True)

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, ids, mask, scale=None):
        assert ids.shape == (6,) and ids.dtype is torch.int64 and mask.all()
        return self.table(ids).sum(-1) * scale

def like_its_example(): return Softmax(), (torch.linspace(-20.0, 20.0, 8).half(),)
def sound(): return Softmax(), (torch.linspace(-2.0, 2.0, 8),)
def tokens():
    torch.manual_seed(0)
    return Tokens(), (torch.arange(6) % 5, torch.ones(6, dtype=torch.bool)), {"scale": torch.rand(6)}
def strategy():
    from ampcheck.strategies import tensors
    return Softmax(), tensors("float16", min_value=-100, max_value=100)
def constant(): return Softmax(), (torch.ones(4),)
def loop(): return {"step": lambda i: 0.0}
"""

QUICK = ("--no-compile", "--examples", "30")


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs the command in a folder with `searched.py`; the import is undone afterwards."""
    (tmp_path / "searched.py").write_text(TARGETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Said:
        return Said(main(["search", *arguments]), *capsys.readouterr())

    yield run
    sys.modules.pop("searched", None)


@pytest.mark.parametrize("target", ["like_its_example", "strategy"])
def test_an_input_that_breaks_the_model_is_found_with_its_line_and_a_command_that_finds_it_again(
    search: Any, target: str
) -> None:
    said = search(f"searched.py:{target}", *QUICK, "--json", "run.json", "--sarif", "run.sarif")
    assert said.code == 1
    finding = Run.load("run.json").of(Verdict.FAIL)[0]
    assert (finding.check, finding.where.line) == ("property-finite", 7)
    assert "12.0" in said.out, "the smallest whole number whose exp is beyond float16"
    assert finding.check in json.dumps(json.loads(Path("run.sarif").read_text(encoding="utf-8")))
    words = shlex.split(finding.reproduce)
    assert words[:3] == ["ampcheck", "search", f"searched.py:{target}"]
    again = search(*words[2:], "--json", "again.json")
    assert again.code == 1
    assert Run.load("again.json").of(Verdict.FAIL)[0].key == finding.key


def test_inputs_stay_in_the_ranges_of_the_example_and_keep_what_has_none(search: Any) -> None:
    said = search("searched.py:sound", "searched.py:tokens", *QUICK, "--dtype", "bfloat16", "--json", "run.json")
    assert said.code == 0, said.out
    assert "search of 2 targets" in said.out
    run = Run.load("run.json")
    assert {finding.subject for finding in run.of(Verdict.PASS) if finding.check == "property-accuracy"} == {
        "searched.py:sound [bfloat16, eager]",
        "searched.py:tokens [bfloat16, eager]",
    }
    assert run.coverage.seen["examples"] >= 40


def test_a_wider_domain_breaks_what_its_example_does_not(search: Any) -> None:
    said = search("searched.py:sound", *QUICK, "--dtype", "float16", "--domain=-100,100")
    assert said.code == 1
    assert "--domain=-100,100" in said.out


def test_a_failure_is_written_as_a_test(search: Any) -> None:
    search("searched.py:strategy", *QUICK, "--reproduce", "found")
    assert "assert_property(" in next(Path("found").glob("test_*.py")).read_text(encoding="utf-8")


def test_settings_of_the_repository_apply(search: Any) -> None:
    Path("pyproject.toml").write_text('[tool.ampcheck]\nignore = ["property-*"]\n', encoding="utf-8")
    assert search("searched.py:strategy", *QUICK).code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("searched.py:loop",), "is of kind training: a search needs (model, args) or (model, strategy)"),
        (("searched.py:constant",), "no tensor among its arguments to draw other values for"),
        (("searched.py:sound", "--domain", "3"), "--domain takes two numbers, such as --domain=-10,10; found '3'"),
        (("searched.py:sound", "--domain", "4,3"), "two finite numbers with low < high"),
        (("searched.py:sound", "--examples", "0"), "examples must be a whole number, 1 or more; found 0"),
        (("searched.py:sound", "--dtype", "int8"), "int8"),
        (("searched.py:none",), "has no 'none'"),
    ],
)
def test_what_cannot_be_searched_is_a_usage_error(search: Any, arguments: tuple[str, ...], said: str) -> None:
    done = search(*arguments)
    assert done.code == 2
    assert said in done.err
