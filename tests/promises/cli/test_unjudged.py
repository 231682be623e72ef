"""What was asked for and not judged is incomplete, and ends in exit code 2: selected checks, and targets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import main

import ampcheck.audit
from ampcheck import Run, Verdict

assert ampcheck.audit

TARGETS = """
import torch
from torch import nn


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


def subject():
    return Branch(), (torch.randn(2, 8),)


def overflow():
    return (lambda x: x.half() * 1e5), (torch.ones(3),)


def forever():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


def forever_without_while():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in iter(int, 1):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
"""
FAST = ("--fast", "--dtype", "float16")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(TARGETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("select", ["graph-break", "compiled-error", "stagnation", "recompile,overflow", "dtype"])
def test_a_selected_check_that_did_not_run_is_incomplete_and_no_pass(folder: Path, select: str, capfd) -> None:
    assert main(["audit", "mine.py:subject", *FAST, "--select", select, "--json", "run.json"]) == 2
    out = " ".join(capfd.readouterr().out.split())
    lacking = select.partition(",")[0]
    assert "1 incomplete" in out.partition("incomplete ")[0]
    assert f"incomplete {lacking}: selected and not judged: no run took place that it looks at" in out
    (finding,) = Run.load("run.json").of(Verdict.INCOMPLETE)
    assert (finding.check, finding.unjudged) == (lacking, True)


@pytest.mark.parametrize("select", ["overflow", "integer-cast,overflow", "over*,stag*", "flush"])
def test_selected_checks_that_ran_are_a_pass(folder: Path, select: str, capfd) -> None:
    code = main(["audit", "mine.py:subject", *FAST, "--select", select])
    assert code == (2 if "stag" in select else 0)


def test_each_selected_check_may_be_judged_in_another_target(folder: Path, capfd) -> None:
    targets = ("mine.py:subject", "mine.py:forever_without_while")
    assert main(["audit", *targets, *FAST, "--select", "silent-zero,stagnation"]) == 0
    assert main(["audit", *targets, *FAST, "--select", "silent-zero,graph-break"]) == 2


def test_a_selection_of_the_repository_is_one_of_which_something_must_be_judged(folder: Path, capfd) -> None:
    settings = folder / "pyproject.toml"
    settings.write_text('[tool.ampcheck]\nselect = ["overflow", "stagnation"]\n', encoding="utf-8")
    assert main(["audit", "mine.py:subject", *FAST]) == 0
    settings.write_text('[tool.ampcheck]\nselect = ["stagnation"]\n', encoding="utf-8")
    assert main(["audit", "mine.py:subject", *FAST]) == 2


@pytest.mark.parametrize(
    ("targets", "code"),
    [
        (("nosuch.py:x", "mine.py:subject"), 2),
        (("mine.py:subject", "mine.py:nosuch"), 2),
        (("nosuch.py:x", "mine.py:overflow"), 1),
        (tuple(f"nosuch.py:{number}" for number in range(200)), 2),
        (("mine.py:subject", "mine.py:subject"), 0),
    ],
)
def test_a_target_that_cannot_be_judged_ends_in_2_unless_another_fails(
    folder: Path, targets: tuple[str, ...], code: int, capfd
) -> None:
    assert main(["audit", *targets, *FAST]) == code
    assert ("incomplete" in capfd.readouterr().out) == (code != 0)


def test_a_baseline_of_targets_that_cannot_be_judged_ends_in_2(folder: Path, capfd) -> None:
    assert main(["baseline", "nosuch.py:x", "mine.py:overflow", *FAST]) == 2
    captured = capfd.readouterr()
    assert "1 places accepted" in captured.out or "1 place accepted" in captured.out
    assert "1 target could not be judged, such as nosuch.py:x, not judged: there is no file nosuch.py" in captured.err


@pytest.mark.parametrize("targets", [[""], ["  "], ["mine.py:subject", ""]])
def test_an_empty_target_is_refused_and_not_the_demo(folder: Path, targets: list[str], capfd) -> None:
    assert main(["audit", *targets, *FAST]) == 2
    assert "a target must name what to audit" in capfd.readouterr().err


@pytest.mark.parametrize("entry", ['""', '{target = ""}', '"mine.py:subject", " "'])
def test_an_empty_target_of_the_repository_is_refused(folder: Path, entry: str, capfd) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.ampcheck]\ntargets = [{entry}]\n", encoding="utf-8")
    assert main(["audit", *FAST]) == 2
    assert "a target in [tool.ampcheck] of pyproject.toml must name what to audit" in capfd.readouterr().err


@pytest.mark.parametrize("target", ["forever", "forever_without_while"])
def test_training_that_never_returns_is_observed(folder: Path, target: str, capfd) -> None:
    assert main(["audit", f"mine.py:{target}", "--fast", "--steps", "3"]) == 0
    assert "3 optimizer steps" in capfd.readouterr().out
