"""Promise: a script that reads its command line is audited with its defaults, and sees none of ampcheck's options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ampcheck.cli.main import main
from ampcheck.core.run import Run

SCRIPT = """
import argparse, sys
import torch

AT_IMPORT = list(sys.argv)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    assert AT_IMPORT == sys.argv == ["train.py"], sys.argv
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
"""


def test_a_script_runs_with_the_defaults_of_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    own = list(sys.argv)
    assert main(["audit", "train.py:main", "--steps", "2", "--json", "run.json"]) == 0
    assert Run.load("run.json").coverage.seen["steps"] == 2
    assert sys.argv == own


def test_a_function_that_trains_and_returns_something_is_told_to_return_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT + "    return model\n")
    assert main(["audit", "train.py:main"]) == 2
    assert "judged as it runs if it returns nothing: remove its return value" in capsys.readouterr().err
