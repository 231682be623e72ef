"""Promise: a script that reads its command line is audited with its defaults, and sees none of ampcheck's options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import main

from ampcheck import Run

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


def audited(*options: str) -> Run:
    assert main(["audit", "train.py:main", "--json", "run.json", *options]) in (0, 1)
    return Run.load("run.json")


@pytest.mark.parametrize("steps", [2, 100])
def test_a_factory_may_train_its_model_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.chdir(tmp_path)
    script = SCRIPT.replace("default=3", f"default={steps}")
    Path("train.py").write_text(script + "    return model, (torch.ones(2, 4),)\n")
    subjects = {finding.subject for finding in audited("--fast").findings}
    assert "train.py:main [float16, eager]" in subjects


ONCE = "    import os\n    os.mkdir('run')  # fails in a second run\n"


@pytest.mark.parametrize("steps", [2, 40])
def test_a_function_that_trains_and_returns_its_model_runs_once_and_the_advice_makes_it_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    monkeypatch.chdir(tmp_path)
    script = SCRIPT.replace("default=3", f"default={steps}").replace("    model =", ONCE + "    model =")
    Path("train.py").write_text(script + "    return model\n")
    assert main(["audit", "train.py:main"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert ("to judge its training, interrupt it" in said) == (steps > 24)
    assert "found Linear" in said
    advised = "def train(): main()"
    assert f"if it trains, name a function that calls it and returns nothing: {advised}" in said
    Path("run").rmdir()
    Path("train.py").write_text(Path("train.py").read_text() + f"\n\n{advised}\n")
    assert main(["audit", "train.py:train", "--json", "run.json"]) in (0, 1)
    assert Run.load("run.json").coverage.seen["steps"] == min(steps, 24)


def test_a_function_that_trains_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.replace("    model =", ONCE + "    model ="))
    assert audited().coverage.seen["steps"] == 3


def test_random_numbers_are_equal_in_each_run_of_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draws = "    import random, numpy\n"
    draws += "    print('drawn', torch.rand(1).item(), random.random(), numpy.random.rand())\n"
    Path("train.py").write_text(SCRIPT.replace("    model =", draws + "    model ="))
    printed = []
    for _ in range(2):
        audited("--steps", "2")
        printed.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("drawn")])
    assert printed[0] == printed[1] != []


@pytest.mark.parametrize("at_import", [False, True])
def test_what_a_script_requires_is_named_and_given_after_two_dashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at_import: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    parses = (
        'parser = argparse.ArgumentParser()\n{0}parser.add_argument("--data", required=True)\n{0}parser.parse_args()'
    )
    inside, before = ("", parses.format("")) if at_import else (f"    {parses.format('    ')}\n", "")
    loop = SCRIPT[SCRIPT.index("    model =") :].replace("options.steps", "3")
    Path("train.py").write_text(f"import argparse\nimport torch\n{before}\ndef main():\n{inside}{loop}")
    assert main(["audit", "train.py:main", "--fast"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "refuses it: the following arguments are required: --data; give it arguments after --" in said
    assert "as ampcheck audit train.py:main -- --name value" in said
    assert main(["audit", "train.py:main", "--fast", "--json", "run.json", "--", "--data", "x y"]) in (0, 1)
    assert Run.load("run.json").coverage.seen["steps"] == 3
