"""What runs by default is chosen from measured seconds: functions and files keep their cheapest, and all fit."""

from __future__ import annotations

import json
from pathlib import Path

import budget
import pytest
from budget import DEFAULT, ROOT, Budget, paid, summary

CASES = [f"tests/units/test_a.py::test_many[{number}]" for number in range(10)]
SECONDS = {
    "tests/units/test_a.py": {"test_many": 0.2, "test_many[9]": 5.0, "test_compiles": 4.0},
    "tests/units/test_b.py": {"test_compiles": 9.0, "test_trains": 7.0, "test_never": None},
    "tests/promises/test_c.py": {"test_trains": 7.0, "test_compiles[x]": 8.0, "test_compiles": 9.0},
    "tests/units/test_d.py": {"test_never": None},
}
TESTS = [
    *CASES,
    "tests/units/test_a.py::test_compiles",
    "tests/units/test_a.py::test_new",
    *(f"tests/units/test_b.py::test_{name}" for name in ("compiles", "trains", "never")),
    *(f"tests/promises/test_c.py::test_{name}" for name in ("trains", "compiles[x]", "compiles[y]")),
    "tests/units/test_d.py::test_never",
]


def names(chosen: set[str], file: str) -> set[str]:
    return {test.rpartition("::")[2] for test in chosen if file in test}


def test_a_function_runs_as_many_cases_as_the_allowance_pays_for_and_a_new_test_runs() -> None:
    chosen = Budget(SECONDS, 0.65).chosen(TESTS)
    assert names(chosen, "test_a.py") == {"test_many[0]", "test_many[3]", "test_many[6]", "test_new"}
    assert names(Budget(SECONDS, 60).chosen(TESTS), "test_a.py") == names(set(TESTS), "test_a.py")


def test_a_file_keeps_its_cheapest_test_and_a_promise_its_cheapest_case() -> None:
    chosen = Budget(SECONDS, 0.1).chosen(TESTS)
    assert names(chosen, "test_b.py") == {"test_trains"}
    assert names(chosen, "test_c.py") == {"test_trains", "test_compiles[x]"}
    assert not names(chosen, "test_d.py")  # nothing is known of it, but that it is slow


@pytest.mark.parametrize("allowance", [0.0, 0.25, 0.65, 3.0])
def test_the_same_is_chosen_of_a_file_as_of_the_suite(allowance: float) -> None:
    whole = Budget(SECONDS, allowance).chosen(TESTS)
    for file in SECONDS:
        own = [test for test in TESTS if test.startswith(file)]
        assert Budget(SECONDS, allowance).chosen(own) == whole & set(own)


def test_dear_cases_are_paid_last_and_of_equals_an_even_sample() -> None:
    costs = {"dear": 3.0, **{str(number): 1.0 for number in range(6)}}
    assert paid(costs, 0.9) == []
    assert paid(costs, 3.5) == ["0", "2", "4"]
    assert paid(costs, 9.0) == [*"012345", "dear"]


def test_the_allowance_is_the_largest_that_fits() -> None:
    many = [f"tests/units/test_x.py::test_{number}[{case}]" for number in range(200) for case in range(20)]
    seconds = {"tests/units/test_x.py": {f"test_{number}": 0.2 for number in range(200)}}
    fitted = Budget(seconds).fitted(many)
    assert 0.9 * DEFAULT <= fitted.total(fitted.chosen(many)) <= DEFAULT
    assert len({sum(f"test_{number}[" in test for test in fitted.chosen(many)) for number in range(200)}) == 1


def test_what_ran_is_measured_and_of_others_what_was_known_is_kept() -> None:
    before = {"tests/units/test_budget.py": {"test_kept": 3.0, "test_gone": 2.0}, "tests/gone.py": {"test_x": 1.0}}
    tests = [f"tests/units/test_budget.py::test_{name}" for name in ("kept", "new[a]", "new[b]", "new[c]", "cheap")]
    times = dict(zip(tests[1:], (0.2, 4.0, 0.1, 0.001), strict=True))
    after = Budget(before).measured(times, tests)
    assert after.seconds == {"tests/units/test_budget.py": {"test_kept": 3.0, "test_new": 0.15, "test_new[b]": 4.0}}


def test_a_case_that_was_not_measured_stays_as_it_was() -> None:
    names = ["test_a[x]", "test_a[y]", "test_a[z]"]
    assert summary("test_a", names, {"test_a[x]": 0.1}, {"test_a[y]": None, "test_a": 9.0}) == {
        "test_a": 0.1,
        "test_a[y]": None,
    }


def test_the_file_reads_as_it_was_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(budget, "FILE", tmp_path / "budget.json")
    Budget(SECONDS, 0.5).save()
    assert Budget.load() == Budget(SECONDS, 0.5)


def test_the_files_of_the_budget_exist() -> None:
    """After a file of tests moved: `python -m pytest --collect-only -q --write-budget`."""
    data = json.loads(budget.FILE.read_text(encoding="utf-8"))
    assert [file for file in data["seconds"] if not (ROOT / file).exists()] == []
