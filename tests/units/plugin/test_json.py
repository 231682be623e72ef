"""`--ampcheck-json` and its ini twin; where a path is judged, `--ampcheck-html` is held to the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ampcheck.core.run import SCHEMA, Run, Verdict

BOTH = pytest.mark.parametrize("flag", ["--ampcheck-json", "--ampcheck-html"])


def leftovers(folder: Path) -> set[str]:
    """Files that are not the suite's: reports, whole or half."""
    ours = {path.name for path in folder.iterdir() if path.is_file()}
    return {name for name in ours if not name.startswith("test_") and name not in ("sample.py", "conftest.py")}


def test_the_run_is_kept(suite: pytest.Pytester, spread: str) -> None:
    result = suite.runpytest(spread, "--ampcheck-json=run.json")
    result.assert_outcomes(passed=5, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(["ampcheck: *", "=* ampcheck *=", f"wrote {suite.path / 'run.json'}"])
    run = Run.load(suite.path / "run.json")
    assert [finding.subject for finding in run.findings] == ["Known", "Big", "first", "second", "Tiny", "Tiny", "Tiny"]
    assert run.counts() == {Verdict.FAIL: 2, Verdict.WARN: 1, Verdict.PASS: 4}
    assert run.coverage.seen == {"ops": 45}
    assert run.environment == {"torch": "2.0"}
    assert run.findings[1].observed == math.inf


def test_two_workers_keep_what_one_process_keeps(suite: pytest.Pytester) -> None:
    for spread in ("-n0", "-n2"):
        suite.runpytest(spread, f"--ampcheck-json=run{spread}.json")
    one, two = (suite.path.joinpath(f"run{spread}.json").read_bytes() for spread in ("-n0", "-n2"))
    assert one == two


def test_a_table_names_the_tests(suite: pytest.Pytester) -> None:
    suite.runpytest("-n0", "--ampcheck-json=run.json")
    table, *others = Run.load(suite.path / "run.json").tables
    assert table.title == "Tests"
    verdicts = ("fail", "warn", "undecided", "incomplete", "accepted", "skip", "pass")
    assert table.columns == ("test", "outcome", "subject", "looked at", *verdicts)
    assert table.rows[:3] == (
        ("test_suite.py::test_known", "xfailed", "Known", 5, 1, 0, 0, 0, 0, 0, 0),
        ("test_suite.py::test_overflows", "failed", "Big", 4, 1, 0, 0, 0, 0, 0, 0),
        ("test_suite.py::test_two", "passed", "first, second", 30, 0, 1, 0, 0, 0, 0, 1),
    )
    assert len(table.rows) == 6
    assert others[0].note == "Counted. Test: test_suite.py::test_known"


def test_a_chart_names_its_test_too(suite: pytest.Pytester) -> None:
    suite.runpytest("-n0", "--ampcheck-json=run.json")
    assert Run.load(suite.path / "run.json").charts[0].note == "Test: test_suite.py::test_known"


def test_numbers_of_numpy_become_plain(sample: pytest.Pytester, spread: str) -> None:
    sample.makepyfile("import numpy\nfrom sample import judge\ndef test_it(): judge('pass', 1, '', numpy.float64(0.5))")
    sample.runpytest_subprocess(spread, "--ampcheck-json=run.json").assert_outcomes(passed=1)
    assert Run.load(sample.path / "run.json").findings[0].observed == 0.5


def test_text_that_no_encoding_has_arrives(sample: pytest.Pytester, spread: str) -> None:
    sample.makepyfile("from sample import judge\ndef test_it(): judge('pass', message='odd \\udc80 name')")
    sample.runpytest(spread, "--ampcheck-json=run.json").assert_outcomes(passed=1)
    assert Run.load(sample.path / "run.json").findings[0].message == "odd \udc80 name"


def test_a_suite_that_emits_nothing_keeps_an_empty_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest("-n0", "--ampcheck-json=run.json").assert_outcomes(passed=1)
    run = Run.load(pytester.path / "run.json")
    assert (run.findings, run.coverage.total) == ((), 0)


def test_the_ini_twin(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nampcheck_json = from_ini.json\n")
    suite.runpytest("-n0")
    assert leftovers(suite.path) == {"tox.ini", "from_ini.json"}
    suite.runpytest("-n0", "--ampcheck-json=from_option.json")
    assert leftovers(suite.path) == {"tox.ini", "from_ini.json", "from_option.json"}


def test_the_path_is_relative_to_where_pytest_was_called(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\n")
    suite.makeconftest("import os\nos.chdir(os.path.dirname(__file__))")  # a suite that wanders off
    below = suite.mkdir("below")
    suite.chdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(below)
        suite.runpytest("-n0", suite.path, "--ampcheck-json=run.json")
    assert leftovers(below) == {"run.json"}


def test_no_summary_still_writes_the_file(suite: pytest.Pytester) -> None:
    suite.runpytest("-n0", "--no-summary", "--ampcheck-json=run.json")
    assert len(Run.load(suite.path / "run.json").findings) == 7


def test_a_session_that_stops_early_keeps_what_it_saw(suite: pytest.Pytester) -> None:
    suite.runpytest("-n0", "-x", "--ampcheck-json=run.json").assert_outcomes(passed=4, failed=1)
    assert len(Run.load(suite.path / "run.json").findings) == 6


def test_an_interrupted_session_keeps_what_it_saw(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_z="def test_it(): raise KeyboardInterrupt")
    assert suite.runpytest_subprocess("-n0", "--ampcheck-json=run.json").ret == pytest.ExitCode.INTERRUPTED
    assert len(Run.load(suite.path / "run.json").findings) == 7


@BOTH
def test_a_collection_error_leaves_no_file(suite: pytest.Pytester, flag: str) -> None:
    suite.makepyfile(test_broken="import nothing_of_this_name")
    result = suite.runpytest("-n0", f"{flag}=report")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["no test ran, *report was not written"])
    assert leftovers(suite.path) == set()


def test_a_collection_error_in_a_worker_keeps_what_the_other_tests_said(suite: pytest.Pytester) -> None:
    """Workers of xdist run what they could collect, unlike a single process."""
    suite.makepyfile(test_broken="import nothing_of_this_name")
    suite.runpytest("-n2", "--ampcheck-json=run.json").assert_outcomes(passed=5, failed=1, xfailed=1, errors=1)
    assert len(Run.load(suite.path / "run.json").findings) == 7


@BOTH
def test_a_usage_error_leaves_no_file(suite: pytest.Pytester, flag: str) -> None:
    assert suite.runpytest("-n0", "nowhere.py", f"{flag}=report").ret == pytest.ExitCode.USAGE_ERROR
    assert leftovers(suite.path) == set()


@BOTH
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere/report", "*{flag}=nowhere/report needs a folder that exists and can be written to: */nowhere"),
        (".", "*{flag}=. needs the name of a file, not of a folder"),
        ("", "*{flag}= needs the name of a file, not of a folder"),
    ],
)
def test_a_bad_path_fails_before_the_tests(suite: pytest.Pytester, flag: str, given: str, message: str) -> None:
    suite.makepyfile(test_ran="from pathlib import Path\ndef test_it(): Path('ran').touch()")
    result = suite.runpytest("-n0", f"{flag}={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message.format(flag=flag)}"])
    assert leftovers(suite.path) == set()


def test_a_bad_path_fails_before_the_workers_start(suite: pytest.Pytester) -> None:
    result = suite.runpytest("-n2", "--ampcheck-json=nowhere/run.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *--ampcheck-json=nowhere/run.json needs a folder that exists*"])


def test_one_file_cannot_be_both(suite: pytest.Pytester) -> None:
    result = suite.runpytest("-n0", "--ampcheck-html=report", "--ampcheck-json=./report")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --ampcheck-html and --ampcheck-json need a file each, both are report"])


@BOTH
def test_a_file_that_cannot_be_written_in_the_end_fails_the_session(pytester: pytest.Pytester, flag: str) -> None:
    pytester.mkdir("folder")
    pytester.makepyfile("import os\ndef test_it(): os.rmdir('folder')")
    result = pytester.runpytest("-n0", f"{flag}=folder/report")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["cannot write */folder/report: *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_an_older_file_is_replaced_whole(suite: pytest.Pytester) -> None:
    target = suite.path / "run.json"
    target.write_text("x" * 1_000_000, encoding="utf-8")
    suite.runpytest("-n0", "--ampcheck-json=run.json")
    assert json.loads(target.read_text(encoding="utf-8"))["schema"] == SCHEMA
    assert leftovers(suite.path) == {"run.json"}


@pytest.mark.parametrize("summary", ["", "--no-summary"])
def test_workers_write_nothing(suite: pytest.Pytester, summary: str) -> None:
    """The process that owns the terminal writes once: a worker that wrote would be seen here."""
    suite.makeconftest(
        """
        import os
        import ampcheck.core.run

        def written(path, text):
            with open("written", "a") as log:
                log.write(os.environ.get("PYTEST_XDIST_WORKER", "main") + " ")

        ampcheck.core.run.write_atomically = written
        """
    )
    suite.runpytest_subprocess("-n2", "--ampcheck-json=run.json", *summary.split())
    assert suite.path.joinpath("written").read_text(encoding="utf-8").split() == ["main"]
