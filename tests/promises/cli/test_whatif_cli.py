"""`ampcheck whatif`: its report, its filter, its files and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import main

from ampcheck import Run, Verdict

MODEL = """
import torch
from torch import nn


def subject():
    tokens = torch.randn(32, 16)
    tokens[0] *= {scale}
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), (tokens,)
"""

TRAINING = """
import torch
from torch import nn


def main():
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        net(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL.format(scale=1.0))
    return "net.py:subject"


def test_a_report_has_the_recipes_the_front_and_the_filter(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", target, "--recipe", "rowwise,nvfp4", "--budget", "6", "--json", "run.json"]) == 0
    printed = capsys.readouterr().out
    for text in ("All linear layers in a recipe", "Which layers to keep", "def nvfp4_filter_fn(module, fqn):"):
        assert text in printed
    assert "Layers in nvfp4" not in printed
    run = Run.load("run.json")
    assert [finding.verdict for finding in run.findings] == [Verdict.PASS] * 2
    assert [table.title for table in run.tables][1:3] == ["Layers in rowwise", "Layers in nvfp4"]
    assert [chart.check for chart in run.charts] == ["format-loss"]


def test_a_budget_that_no_choice_keeps_gives_no_filter(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", target, "--recipe", "rowwise", "--budget", "6"]) == 0
    assert "# no choice fits into 6 bits per weight" in capsys.readouterr().out


def test_a_model_without_linear_layers_has_one_table(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("net.py").write_text(
        MODEL.format(scale=1.0).replace("nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)", "nn.ReLU()")
    )
    assert main(["whatif", target]) == 0
    assert capsys.readouterr().out.count("All linear layers in a recipe") == 1


def test_a_lost_layer_is_a_warning_and_fails_nothing(tmp_path: Path, target: str) -> None:
    (tmp_path / "net.py").write_text(MODEL.format(scale=1e8))
    assert main(["whatif", target, "--recipe", "tensorwise", "--no-front", "-v", "--html", "page.html"]) == 0
    assert "format-loss" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--recipe", "fp7"], "recipes must be one of tensorwise"),
        (["--recipe", ","], "recipes must name one of tensorwise"),
        (["--budget", "0"], "budget"),
        (["--budget", "8", "--no-front"], "a budget is spent along the front"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(
    target: str, options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", target, *options]) == 2
    assert text in capsys.readouterr().err


def test_training_is_compared_with_float64_for_as_many_steps_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    assert main(["whatif", "train.py:main", "--recipe", "rowwise", "--steps", "3", "--json", "run.json"]) == 0
    out = capsys.readouterr().out
    assert "Training, 3 steps" in out
    assert "rowwise but for 0, 4" in out
    run = Run.load("run.json")
    assert {(finding.check, finding.verdict) for finding in run.findings} == {("format-drift", Verdict.PASS)}


def test_a_budget_for_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    assert main(["whatif", "train.py:main", "--budget", "8"]) == 2
    assert "a budget and a dtype are for models; train.py:main trains" in capsys.readouterr().err
