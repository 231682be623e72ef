"""Every pass of an experiment, and of the checks of autocast and speed, says how much it rests on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ampcheck
from ampcheck.core.run import Verdict
from ampcheck.tools.lab.lab import Expectations
from ampcheck.tools.lab.registry import EXPERIMENTS, experiments_of

ROOMS = ("autocast", "tools/lab", "speed")


def test_an_expectation_of_which_nothing_was_seen_is_not_fulfilled() -> None:
    lab = Expectations("ulp", "cpu")
    assert lab.expect("a", "b", True, seen=3).seen == 3
    assert lab.expect("a", "b", True, seen=3).verdict is Verdict.PASS
    assert lab.expect("a", "b", True, seen=0).verdict is Verdict.SKIP
    assert lab.expect("a", "b", False, seen=0).verdict is Verdict.FAIL
    assert lab.expect("a", "b", False, seen=0, warns=True).verdict is Verdict.WARN


def test_no_room_builds_a_pass_by_hand() -> None:
    folder = Path(ampcheck.__file__).parent
    sources = {file: file.read_text(encoding="utf-8") for room in ROOMS for file in (folder / room).rglob("*.py")}
    assert len(sources) > 30
    assert [str(file) for file, text in sources.items() if re.search(r"\bFinding\([^()]*Verdict\.PASS", text)] == []


@pytest.mark.parametrize("name", ["anatomy", "ulp", "exp", "stagnation"])
def test_every_pass_of_an_experiment_counts(name: str) -> None:
    (experiment,) = experiments_of([name])
    assert experiment in EXPERIMENTS
    passes = experiment.function(device="cpu").of(Verdict.PASS)
    assert passes
    assert all((finding.seen or 0) > 0 for finding in passes)
