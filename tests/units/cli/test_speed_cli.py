"""`ampcheck speed TARGET`: what it measures by its options, what it writes, and a usage error in one sentence."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from ampcheck.cli import speed as speed_cli
from ampcheck.cli.main import main
from ampcheck.cli.output import USAGE
from ampcheck.core.run import Coverage, Finding, Run, Table, Verdict
from ampcheck.numerics.compiled import Graphs
from ampcheck.records.speed import TWIN, ArmTimes, SpeedStats
from ampcheck.speed import modes
from ampcheck.speed.base import judge as base_judge
from ampcheck.speed.options import SpeedOptions

TARGETS = """
import torch
from torch import nn

def make(): return nn.Linear(8, 8).eval(), torch.ones(2, 8)
def training(): return {"step": lambda i: 0.0}
"""


@pytest.fixture
def speed(tmp_path, monkeypatch):
    """Runs the command in a folder with `timed.py`."""
    (tmp_path / "timed.py").write_text(TARGETS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    parser = argparse.ArgumentParser()
    speed_cli.add_command(parser.add_subparsers())

    def run(*arguments):
        options = parser.parse_args(["speed", *arguments])
        return options.command(options)

    yield run
    sys.modules.pop("timed", None)


@pytest.fixture
def times(monkeypatch):
    """Milliseconds of each arm in place of a measurement; the reference takes 1."""
    asked = {}

    def measured(arms, rules, options, **settings):
        asked.update(settings, options=options, arms=list(arms))
        first, *rest = arms
        given = [ArmTimes(first, (0.001,) * 40), ArmTimes(TWIN, (0.001,) * 40)]
        given += [ArmTimes(name, (0.001 * asked["slower"],) * 40) for name in rest]
        return SpeedStats(settings["subject"], tuple(given))

    asked["slower"] = 0.5
    monkeypatch.setattr(modes, "measure_until_decided", measured)
    monkeypatch.setattr(modes, "many_compilations", lambda device: nullcontext())
    monkeypatch.setattr(modes, "compilations", lambda: lambda: Graphs(count=1))
    monkeypatch.setattr(modes, "step_of", lambda subject, config, device: lambda: None)
    return asked


def test_compiled_is_compared_with_eager_and_a_slower_one_is_a_warning(speed, times, capsys):
    assert speed("timed.py:make", "--json", "run.json") == 0
    assert times["arms"] == ["eager, float32", "default, float32"]
    assert [found.verdict for found in Run.load("run.json").findings] == [Verdict.PASS]
    times["slower"] = 2.0
    assert speed("timed.py:make", "--json", "run.json") == 0
    assert [found.verdict for found in Run.load("run.json").findings] == [Verdict.WARN]
    assert "default, float32" in capsys.readouterr().out


def test_a_ratio_that_is_required_fails_when_it_is_missed(speed, times):
    assert speed("timed.py:make", "--at-least", "1.5") == 0
    assert speed("timed.py:make", "--at-least", "2.5") == 1


def test_modes_and_precisions_are_multiplied_and_eager_stands_for_each_precision(speed, times):
    speed("timed.py:make", "--mode", "default, max-autotune", "--precision", "float32,bfloat16", "--budget", "3")
    assert times["arms"] == [
        f"{mode}, {precision}" for precision in ("float32", "bfloat16") for mode in ("eager", "default", "max-autotune")
    ]
    assert times["options"].budget == 3


def test_against_a_base_the_options_arrive_and_all_three_files_are_written(speed, monkeypatch, capsys):
    asked = {}

    def judged(target, base, options, **settings):
        asked.update(settings, target=target, base=base, options=options)
        found = Finding("regression", Verdict.FAIL, "m", "slower")
        tables = (Table("a", ("x",), [(1,)]), Table("rounds", ("x",), [(1,)]), Table("sides", ("x",), [(1,)]))
        return Run(findings=(found,), coverage=Coverage({"launches": 9}), tables=tables, title="m")

    monkeypatch.setattr(base_judge, "judge_base", judged)
    files = ("--json", "r.json", "--html", "r.html", "--markdown", "r.md")
    rest = ("--mode", "default", "--effect", "0.05", "--comparisons", "20", "--launches", "4", "--budget", "9")
    assert speed("m:f", "--base", "main", *rest, *files) == 1
    assert (asked["target"], asked["base"], asked["at_least"], asked["device"]) == ("m:f", "main", 1.0, "cpu")
    assert asked["options"] == SpeedOptions(mode="default", effect=0.05, comparisons=20, launches=4, budget=9)
    assert all(Path(name).stat().st_size for name in files[1::2])
    out = capsys.readouterr().out
    assert "sides" in out
    assert "rounds" not in out, "the rounds are for -v and the files"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "a TARGET is required"),
        (("timed.py:missing",), "'missing'"),
        (("timed.py:training",), "cannot be chosen for it"),
        (("timed.py:make", "--mode", "fast"), "mode must be one of .*; found 'fast'"),
        (("timed.py:make", "--precision", "float12"), "precision must be one of .*; found 'float12'"),
        (("timed.py:make", "--mode", "eager"), "two configurations are required"),
        (("timed.py:make", "--device", "toaster"), "'toaster' is not there"),
        (("timed.py:make", "--launches", "3"), "launches has no effect here"),
        (("timed.py:make", "--startup", "--at-least", "2"), "--at-least has no effect with --startup"),
        (("--matrix",), "a TARGET is required, .* --matrix has no workloads of its own"),
        (("timed.py:make", "--startup", "--effect", "0.1"), "effect has no effect here"),
        (("timed.py:make", "--matrix", "--launches", "3"), "launches has no effect here"),
        (("timed.py:make", "--base", "main"), "in none"),
        (("timed.py:make", "--base", "main", "--mode", "default,eager"), "--mode takes one name here"),
        (("timed.py:make", "--at-least", "0"), "at_least must be a finite number above 0"),
        (("timed.py:make", "--effect", "3"), "effect must be a finite number above 0 and below 1"),
        (("timed.py:make", "--markdown", "nowhere/run.md"), "there is no folder nowhere"),
        (("timed.py:make", "--budget", "0"), "budget must be a finite number above 0; found 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
@pytest.mark.usefixtures("speed")
def test_a_usage_error_is_one_sentence(capsys, arguments, said):
    assert main(["speed", *arguments]) == USAGE
    told = capsys.readouterr().err
    assert re.search(said, told)
    assert told.count("\n") == 1


@pytest.mark.parametrize("pair", [("--base", "main", "--startup"), ("--matrix", "--startup")], ids=" ".join)
def test_two_questions_at_once_are_refused(speed, pair, capsys):
    with pytest.raises(SystemExit):
        speed("timed.py:make", *pair)
    assert "not allowed with" in capsys.readouterr().err


def test_a_real_measurement_of_a_small_model_ends_and_is_told(speed, capsys):
    code = speed("timed.py:make", "--mode", "eager", "--precision", "float32,bfloat16", "--budget", "0.2", "-v")
    assert code == 0
    assert "eager, bfloat16" in capsys.readouterr().out
