"""`--benchmark-compare` for speed tests: what the baseline lacks, what it holds, what is not comparable."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from speed_suite import PAYS, Suite, findings
from speed_suite import speedy as speedy

SAVED = PAYS + PAYS.replace("test_pays", "test_gone")
SLOWER = PAYS.replace("arms()", "arms(compiled=0.0125)")


def saved(suite: pytest.Pytester) -> Path:
    (path,) = suite.path.glob(".benchmarks/*/*.json")
    return path


def change(suite: pytest.Pytester, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the records that pytest-benchmark has saved."""
    data = json.loads(saved(suite).read_text(encoding="utf-8"))
    for one in data["benchmarks"]:
        edit(one["extra_info"])
    saved(suite).write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture
def kept(speedy: Suite) -> pytest.Pytester:
    """A suite whose one test was saved."""
    suite = speedy()
    suite.runpytest("-n0", "--benchmark-save=base").assert_outcomes(passed=1)
    return suite


def test_a_benchmark_that_the_baseline_lacks_is_a_warning(speedy: Suite) -> None:
    suite = speedy()
    suite.runpytest("-n0", "--benchmark-autosave").assert_outcomes(passed=1)
    speedy(SAVED.replace("test_gone", "test_new"))
    result = suite.runpytest("-n0", "--benchmark-compare", "--ampcheck-json=run.json")
    result.assert_outcomes(passed=2)
    told = {one["subject"]: (one["verdict"], one["message"]) for one in findings(suite, "regression")}
    assert told["test_speeds.py::test_pays"][0] == "pass"
    assert told["test_speeds.py::test_new"] == (
        "warn",
        "the baseline has no benchmark of this name, so nothing was compared",
    )
    result.stdout.fnmatch_lines(["WARN regression: test_speeds.py::test_new"])
    for row in ("test_pays (0001_*", "test_pays (NOW)*"):  # pytest-benchmark's own table, sorted by time
        result.stdout.fnmatch_lines([row])
    result = suite.runpytest("-n0", "--benchmark-compare")
    result.stdout.fnmatch_lines(["ampcheck: 1 warn among the findings of speed tests; --ampcheck shows them"])


def test_a_benchmark_that_did_not_run_is_told_once(speedy: Suite) -> None:
    suite = speedy(SAVED)
    suite.runpytest("-n0", "--benchmark-save=base").assert_outcomes(passed=2)
    speedy()
    suite.runpytest("-n0", "--benchmark-compare=0001", "--ampcheck-json=run.json").assert_outcomes(passed=1)
    (missing,) = (one for one in findings(suite, "regression") if one["subject"] == "the baseline")
    assert missing["verdict"] == "warn"
    assert missing["message"].endswith("this session did not run 1 of them: test_speeds.py::test_gone")
    suite.runpytest("-n0", "--benchmark-compare", "--benchmark-disable", "--ampcheck-json=run.json")
    assert findings(suite, "regression") == []


SHARD = """

def pytest_collection_modifyitems(items):
    del items[1:]
"""


def missing(suite: pytest.Pytester, *options: str) -> list[str]:
    """What is said of tests that did not run."""
    suite.runpytest("-n0", "--benchmark-compare=0001", "--ampcheck-json=run.json", *options)
    told = [one for one in findings(suite, "regression") if one["subject"] == "the baseline"]
    return [one["message"].partition(": ")[2] for one in told]


def test_only_what_this_session_was_asked_for_is_missed(speedy: Suite) -> None:
    suite = speedy(SAVED)
    suite.mkdir("other").joinpath("test_elsewhere.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    suite.runpytest("-n0", "--benchmark-save=base").assert_outcomes(passed=3)
    both, gone = "test_speeds.py::test_pays, test_speeds.py::test_gone", "test_speeds.py::test_gone"
    assert missing(suite) == []
    assert missing(suite, "-k", "pays") == []
    assert missing(suite, "--deselect=test_speeds.py::test_gone") == []
    assert missing(suite, "test_speeds.py::test_pays") == []
    assert missing(suite, "other") == []
    speedy(PAYS)
    assert missing(suite) == missing(suite, "test_speeds.py") == missing(suite, gone) == [gone]
    assert missing(suite, "-k", "pays") == [gone], "it is not there at all"
    speedy(SAVED.replace("def test_", "@pytest.mark.skip\ndef test_"))
    assert missing(suite) == [both], "they are asked for, and skipped"


def test_another_shards_tests_are_not_missed(speedy: Suite) -> None:
    suite = speedy(SAVED)
    suite.runpytest("-n0", "--benchmark-save=base").assert_outcomes(passed=2)
    conftest = suite.path / "conftest.py"
    conftest.write_text(conftest.read_text(encoding="utf-8") + SHARD, encoding="utf-8")
    assert missing(suite) == []


def test_a_session_that_was_broken_off_misses_nothing(speedy: Suite) -> None:
    suite = speedy(SAVED)
    suite.runpytest("-n0", "--benchmark-save=base").assert_outcomes(passed=2)
    speedy("def test_a():\n    raise ValueError\n" + SAVED)
    assert missing(suite, "-x") == []


def test_without_a_baseline_nothing_is_said_of_one(speedy: Suite) -> None:
    suite = speedy()
    suite.runpytest("-n0", "--ampcheck-json=run.json").assert_outcomes(passed=1)
    assert findings(suite, "regression") == []


def test_a_speedup_that_fell_is_a_warning_and_no_failure(kept: pytest.Pytester, speedy: Suite) -> None:
    speedy(SLOWER)
    kept.runpytest("-n0", "--benchmark-compare", "--ampcheck-json=run.json").assert_outcomes(passed=1)
    (finding,) = findings(kept, "regression")
    assert finding["verdict"] == "warn"
    assert re.search(r"compiled is 2\d % slower, eager unchanged", finding["message"])


def test_compare_fail_is_pytest_benchmarks_own_and_works(kept: pytest.Pytester, speedy: Suite) -> None:
    options = ("-n0", "--benchmark-compare", "--benchmark-compare-fail=median:10%")
    assert kept.runpytest(*options).ret == pytest.ExitCode.OK
    speedy(SLOWER)
    result = kept.runpytest(*options)
    assert result.ret != pytest.ExitCode.OK
    assert "Performance has regressed" in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda info: info["ampcheck"]["fingerprint"].update(torch="1.0"), "not comparable: torch: 1.0 and "),
        (lambda info: info["ampcheck"]["fingerprint"].update(device="abacus"), "not comparable: device: abacus and "),
        (lambda info: info["ampcheck"].update(precision="tf32"), "not comparable: precision: tf32 and float32;"),
        (lambda info: info["ampcheck"].update(schema=99), "not comparable: this has schema 99, newer than "),
        (lambda info: info.pop("ampcheck"), "not comparable: the baseline has absolute times of this name"),
    ],
    ids=["versions", "hardware", "precision", "schema", "plain"],
)
def test_a_baseline_of_another_kind_is_not_comparable(
    kept: pytest.Pytester, edit: Callable[[dict[str, Any]], object], told: str
) -> None:
    change(kept, edit)
    kept.runpytest("-n0", "--benchmark-compare", "--ampcheck-json=run.json").assert_outcomes(passed=1)
    (finding,) = findings(kept, "regression")
    assert finding["verdict"] == "undecided"
    assert finding["message"].startswith(told)


@pytest.mark.filterwarnings("ignore:Can't compare")
def test_a_baseline_that_is_not_there_lacks_everything(speedy: Suite) -> None:
    suite = speedy()
    result = suite.runpytest("-n0", "--benchmark-compare", "--ampcheck-json=run.json")
    result.assert_outcomes(passed=1)
    assert [one["verdict"] for one in findings(suite, "regression")] == ["warn"]
