"""Promise: a mechanism stays if three cases that were not written for it change without it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("sys.argv", ["ablation"])
    return importlib.import_module("ablation")


def _row(name: str, outcome: str) -> Any:
    return importlib.import_module("_ledger_rows").Row("corpus", name, "", outcome)


def test_worse_outcomes_of_defects_and_of_healthy_cases_are_told_from_other_changes(ablation: Any) -> None:
    measured = ablation.Measured("name", "purpose", "commit", 1)
    for name, before, after in (
        ("a", "at", "missed"),
        ("b", "silent", "alarm"),
        ("c", "at", "at"),
        ("d", "missed", "at"),
    ):
        ablation.booked(measured, _row(name, before), _row(name, after))
    assert (measured.lost, measured.alarms, measured.other) == (["a | "], ["b | "], ["c | ", "d | "])


@pytest.mark.parametrize(("own", "decision"), [([], "stays"), (["a"], "on trial")])
def test_cases_that_were_written_for_a_mechanism_do_not_count(ablation: Any, own: list[str], decision: str) -> None:
    measured = ablation.Measured("name", "purpose", "commit", 1, lost=["a", "b"], alarms=["c"], own=own)
    measured.decide()
    assert measured.decision == decision
    assert "| name | purpose | 0 | 0 | 2 | 1 | 0 |" in "\n".join(ablation.table([measured]))


def test_lines_are_those_of_a_function_and_of_what_it_alone_calls(ablation: Any) -> None:
    from mechanisms import located

    decisions = ablation.lines_of([located("shadow.decisions:examine_decision")])
    assert ablation.lines_of([located("shadow.suspects:vanished")]) < 20 < decisions


def test_a_mechanism_is_tried_until_three_cases_need_it(ablation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = importlib.import_module("_ledger_rows")
    before = {}
    for number in range(40):
        row = _row(f"case {number}", "at")
        row.mechanisms, row.seconds = ["vanished", "decisions"][: 1 + number % 2], number
        row.arms = {"": rows.Arm([("overflow", "fail", "f.py:1")])}
        before[row.key] = row

    class Case:
        def __init__(self, key: Any) -> None:
            self.key = key

    class Switched:
        off = ""

        def __init__(self, names: Any, record: bool) -> None:
            (Switched.off,) = names

        def __enter__(self) -> None: ...
        def __exit__(self, *exc: object) -> None: ...

    def rows_of(cases: Any, jobs: int) -> Any:
        for case in cases:
            lost = Switched.off == "vanished" and before[case.key].seconds % 4 == 0
            arms = {"": rows.Arm(passes=1)} if lost else before[case.key].arms
            yield rows.Row("corpus", *case.key, "missed" if lost else "at", arms=arms)

    monkeypatch.setattr(ablation, "rows_of", rows_of)
    monkeypatch.setattr(ablation, "switched", Switched)
    found = ablation.ablate(before, ["vanished", "decisions"], [Case(key) for key in before], 1)
    assert [(each.acts, each.tried, each.foreign) for each in found.values()] == [(40, 12, 3), (20, 20, 0)]
    monkeypatch.setattr(ablation, "added", lambda case: "abc" if case in ("case 0", "case 4") else "def")
    monkeypatch.setattr(ablation, "introduced", lambda name: {"abc"})
    found = ablation.ablate(before, ["vanished"], [Case(key) for key in before], 1)
    assert (found["vanished"].tried, len(found["vanished"].own)) == (24, 2)
