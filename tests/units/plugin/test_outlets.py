"""SARIF, JUnit XML and GitHub: where people look after a session of pytest."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from ampcheck.core.run import Run
from ampcheck.report.markdown import comment_of
from ampcheck.report.sarif import sarif_of


def test_sarif_of_the_session_is_that_of_its_run(suite: pytest.Pytester, spread: str) -> None:
    from ampcheck.checks import REGISTRY

    suite.runpytest(spread, "--ampcheck-sarif=run.sarif", "--ampcheck-json=run.json")
    data = json.loads((suite.path / "run.sarif").read_text(encoding="utf-8"))
    assert data == sarif_of(Run.load(suite.path / "run.json"), REGISTRY, suite.path)
    assert [result["level"] for result in data["runs"][0]["results"]] == ["error", "error", "warning"]


def test_the_ini_twin_of_sarif(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nampcheck_sarif = from_ini.sarif\n")
    suite.runpytest("-n0")
    assert (suite.path / "from_ini.sarif").is_file()


# JUnit XML -----------------------------------------------------------------------------------------------------------


def properties(suite: pytest.Pytester, *options: str) -> dict[str, dict[str, str]]:
    """The properties of each test in JUnit XML."""
    suite.runpytest("--junitxml=junit.xml", *options)
    cases = ElementTree.parse(suite.path / "junit.xml").getroot().iter("testcase")
    return {
        case.get("name", ""): {p.get("name", ""): p.get("value", "") for p in case.iter("property")} for case in cases
    }


@pytest.mark.parametrize("enabled", [(), ("--ampcheck",)])
def test_each_test_has_its_verdicts_and_first_failure_as_properties(
    suite: pytest.Pytester, spread: str, enabled: tuple[str, ...]
) -> None:
    found = properties(suite, spread, *enabled)
    assert found["test_two"] == {"ampcheck.warn": "1", "ampcheck.pass": "1"}
    fingerprint = found["test_overflows"].pop("ampcheck.fingerprint")
    assert len(fingerprint) == 32
    assert found["test_overflows"] == {"ampcheck.fail": "1", "ampcheck.check": "overflow", "ampcheck.where": ""}
    assert found["test_without"] == {}


def test_junit_and_sarif_have_the_same_fingerprint(suite: pytest.Pytester) -> None:
    found = properties(suite, "-n0", "--ampcheck-sarif=run.sarif")
    data = json.loads((suite.path / "run.sarif").read_text(encoding="utf-8"))
    prints = {result["fingerprints"]["ampcheckPlace/v1"] for result in data["runs"][0]["results"]}
    assert f"{found['test_overflows']['ampcheck.fingerprint']}:1" in prints


def test_a_cause_is_named_before_what_follows_from_it(sample: pytest.Pytester) -> None:
    sample.makepyfile(
        """
        from dataclasses import replace
        from sample import a_run
        from ampcheck.outcome.raising import verify

        def test_it():
            (cause,) = (run := a_run("fail")).findings
            follower = replace(cause, check="flush", cause=cause.key)
            verify(replace(run, findings=(follower, cause)))
        """
    )
    assert properties(sample, "-n0")["test_it"]["ampcheck.check"] == "overflow"


def test_hostile_text_leaves_whole_xml(sample: pytest.Pytester, spread: str) -> None:
    sample.makepyfile(
        """
        from dataclasses import replace
        from sample import a_run
        from ampcheck.core.run import Where
        from ampcheck.outcome.raising import verify

        def test_it():
            run = a_run("fail", message="bad ]]> \\x00\\x1b \\udc80", subject="<a>")
            where = Where("forward", "]]>", "\\x00", "odd\\udc80.py", 3)
            verify(replace(run, findings=(replace(run.findings[0], where=where),)))
        """
    )
    assert properties(sample, spread)["test_it"]["ampcheck.fail"] == "1"


def test_junit_xml_alone_prints_no_section(suite: pytest.Pytester) -> None:
    suite.runpytest("-n0", "--junitxml=junit.xml").stdout.no_fnmatch_line("=* ampcheck *=")


# GitHub --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The suite in a job of GitHub Actions."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "summary.md"))
    return suite


def test_a_job_gets_annotations_but_of_expected_failures_and_one_part_of_its_summary(
    job: pytest.Pytester, spread: str
) -> None:
    result = job.runpytest(spread, "--ampcheck-json=run.json")
    assert [line for line in result.outlines if line.startswith("::")] == [
        "::error title=overflow%3A Big::an output stays finite%0AHint: scale it%0AReproduce: "
        "pytest test_suite.py::test_overflows",
        "::warning title=overflow%3A second::an output stays finite%0AHint: scale it%0AReproduce: "
        "pytest test_suite.py::test_two",
    ]
    comment = comment_of(Run.load(job.path / "run.json"), "pytest")
    assert (job.path / "summary.md").read_text(encoding="utf-8") == comment + "\n"


def test_a_job_that_does_not_ask_for_a_report_gets_none(job: pytest.Pytester) -> None:
    result = job.runpytest("-n0")
    assert not [line for line in result.outlines if line.startswith("::")]
    assert not (job.path / "summary.md").exists()


def test_a_summary_that_cannot_be_written_fails_the_session(
    sample: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "nowhere/summary.md")
    sample.makepyfile("def test_it(): pass")
    result = sample.runpytest("-n0", "--ampcheck")
    result.stdout.fnmatch_lines(["the summary of the job cannot be written to $GITHUB_STEP_SUMMARY: *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
