"""`--ampcheck-history=DIR`: what a session adds, what it says of what was there, and where it cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from plugin_suite import Section
from speed_suite import PAYS, Suite, findings
from speed_suite import speedy as speedy

from ampcheck.records.speed import Baseline, SpeedRecord
from ampcheck.speed.baseline import EarlierHistory as Before
from ampcheck.speed.history.storage import import_benchmarks, load

TWO = (
    PAYS
    + """
@pytest.mark.ampcheck(speed=dict(precision="bfloat16", at_least=9))
def test_fails(speed):
    speed(arms(autotuned=0.005), budget=1, clock=Clock())
"""
)


def records(folder: Path) -> list[SpeedRecord]:
    measured = [point.measured for series in load(folder).series for point in series.points]
    return [one for one in measured if isinstance(one, SpeedRecord)]


def test_each_session_adds_all_of_its_records_those_of_failures_too(speedy: Suite, section: Section) -> None:
    suite = speedy(TWO)
    result = suite.runpytest("-n0", "--ampcheck-history=kept/history")
    result.assert_outcomes(passed=1, failed=1)
    folder = suite.path / "kept" / "history"
    assert f"added 3 records to the history in {folder}" in section(result)
    assert sorted((one.name.partition("::")[2], one.arm, one.precision, one.verdict) for one in records(folder)) == [
        ("test_fails", "autotuned", "bfloat16", "fail"),
        ("test_fails", "compiled", "bfloat16", "fail"),
        ("test_pays", "compiled", "float32", "pass"),
    ]
    result = suite.runpytest("-n0", "--ampcheck-history=kept/history", "-k", "pays")
    assert f"added 1 record to the history in {folder}" in section(result)
    assert len(records(folder)) == 4


def test_a_point_has_the_commit_that_was_measured(speedy: Suite) -> None:
    suite = speedy()
    commands = "init -q; add test_speeds.py; -c user.name=a -c user.email=a@b commit -qm a"
    for command in commands.split("; "):
        subprocess.run(["git", *command.split()], cwd=suite.path, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=suite.path, check=True, capture_output=True, text=True)
    suite.runpytest("-n0", "--ampcheck-history=history").assert_outcomes(passed=1)
    (series,) = load(suite.path / "history").series
    assert [(point.commit, point.dirty) for point in series.points] == [(head.stdout.strip(), False)]


def test_the_ini_twin_and_what_it_implies(speedy: Suite) -> None:
    suite = speedy()
    suite.makeini("[pytest]\nampcheck_history = history\n")
    suite.runpytest("-n0").stdout.fnmatch_lines(["ampcheck: *, device cpu", "=* ampcheck *=", "added 1 record *"])
    suite.runpytest("-n0", "--ampcheck-history=other")
    assert len(records(suite.path / "history")) == len(records(suite.path / "other")) == 1


def test_what_the_history_lacks_and_what_did_not_run_is_told(speedy: Suite) -> None:
    suite = speedy()
    options = ("-n0", "--ampcheck-history=history", "--ampcheck-json=run.json")
    suite.runpytest(*options)
    assert findings(suite, "regression") == [], "the first session has nothing to be compared with"
    speedy(PAYS.replace("test_pays", "test_renamed"))
    suite.runpytest(*options).assert_outcomes(passed=1)
    told = {one["subject"]: (one["verdict"], one["message"]) for one in findings(suite, "regression")}
    assert set(told) == {"test_speeds.py::test_renamed", "the history's last session"}
    assert told["test_speeds.py::test_renamed"][1].startswith("the history has no benchmark of this name")
    assert told["the history's last session"][1].endswith("did not run 1 of them: test_speeds.py::test_pays")
    assert {verdict for verdict, _ in told.values()} == {"warn"}
    suite.runpytest(*options)
    assert findings(suite, "regression") == []


def test_a_part_of_the_suite_misses_nothing_of_the_rest(speedy: Suite) -> None:
    suite = speedy(TWO)
    options = ("-n0", "--ampcheck-history=history", "--ampcheck-json=run.json")
    suite.runpytest(*options)
    for part in (("-k", "pays"), ("test_speeds.py::test_pays",), ("-k", "fails")):
        suite.runpytest(*options, *part)
        assert findings(suite, "regression") == []


def test_what_pytest_benchmark_saved_as_well_is_imported_once(speedy: Suite) -> None:
    suite = speedy(TWO)
    suite.runpytest("-n0", "--ampcheck-history=history", "--benchmark-autosave", "--benchmark-json=saved.json")
    done = import_benchmarks(suite.path / "history", [suite.path / ".benchmarks", suite.path / "saved.json"])
    assert (done.added, done.known) == (0, 6)
    assert len(records(suite.path / "history")) == 3


def test_the_history_is_gone_through_once_however_many_tests_there_are(
    speedy: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = speedy(TWO)
    suite.runpytest("-n0", "--ampcheck-history=history")
    made = []
    monkeypatch.setattr(Before, "all", lambda self: made.append(1) or Baseline())
    suite.runpytest("-n0", "--ampcheck-history=history")
    assert len(made) == 1


def test_what_cannot_be_read_is_told_and_kept(speedy: Suite) -> None:
    suite = speedy()
    suite.runpytest("-n0", "--ampcheck-history=history")
    (file,) = suite.path.joinpath("history").glob("*.jsonl")
    with open(file, "a", encoding="utf-8") as stream:
        line = json.loads(file.read_text(encoding="utf-8"))
        stream.write(json.dumps({**line, "record": {**line["record"], "low": 10**400}}) + "\n")
        stream.write('{"schema": 1, "torn')
    result = suite.runpytest("-n0", "--ampcheck-history=history")
    result.stdout.fnmatch_lines(["the history could not be read whole: *line 2*", "*line 3*", "added 1 record to *"])
    assert '"torn' in file.read_text(encoding="utf-8")
    assert len(records(suite.path / "history")) == 2


def test_a_session_without_speed_tests_adds_nothing(speedy: Suite) -> None:
    suite = speedy("def test_it():\n    pass\n")
    result = suite.runpytest("-n0", "--ampcheck-history=history")
    result.stdout.fnmatch_lines(["nothing was added to the history in *: no speed test measured anything"])
    assert not suite.path.joinpath("history").exists()
    suite.runpytest("-n0", "--ampcheck-history=history", "--collect-only")
    assert not suite.path.joinpath("history").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("file", "--ampcheck-history=file needs the name of a folder, not of a file"),
        ("", "--ampcheck-history= needs the name of a folder, not of a file"),
        ("file/inside", "--ampcheck-history=file/inside needs a folder that exists and can be written to: *file"),
        ("shut/inside", "--ampcheck-history=shut/inside needs a folder that exists and can be written to: *shut"),
    ],
)
def test_where_nothing_can_be_written_is_told_before_any_test_runs(
    speedy: Suite, monkeypatch: pytest.MonkeyPatch, given: str, told: str
) -> None:
    suite = speedy()
    suite.path.joinpath("file").touch()
    shut = suite.mkdir("shut")
    real = os.access  # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != shut and real(path, mode))
    result = suite.runpytest("-n0", f"--ampcheck-history={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {told}"])
    result.stdout.no_fnmatch_line("*collected*")


def test_a_history_that_cannot_be_read_is_told_before_any_test_runs(
    speedy: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = speedy()
    folder = suite.mkdir("history")

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    result = suite.runpytest("-n0", f"--ampcheck-history={folder}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --ampcheck-history=*: no history can be read from *: Permission denied"])


def test_a_history_that_fails_at_the_end_fails_the_session(speedy: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = speedy()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ampcheck.speed.history.storage._write", full)
    result = suite.runpytest("-n0", "--ampcheck-history=history")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["cannot add to the history *: No space left on device; of 1 records 0 were added*"])
