"""Where commands write: told before the work what cannot be written, and said where it lies afterwards."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.cli.output import add_output, finish, outputs_of, require_writable
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.report.markdown import comment_of


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ({"html": "nowhere/page.html"}, "cannot write nowhere/page.html: there is no folder nowhere"),
        ({"json": "."}, "cannot write .: it is a folder"),
        ({"html": "x", "json": "./x"}, "--html and --json need a file each, both are x"),
        ({"html": "y", "json": "x", "markdown": "x"}, "--json and --markdown need a file each, both are x"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_sentence(paths: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(UsageError) as raised:
            require_writable(**paths)
    assert str(raised.value) == said


def parsed(*arguments: object, kind: str = "audit") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_output(parser, kind=kind)
    return parser.parse_args([str(argument) for argument in arguments])


def test_what_is_asked_for_is_written_and_its_place_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page, data, sarif, note = (tmp_path / name for name in ("page [bold].html", "run.json", "run.sarif", "note.md"))
    options = parsed("--html", page, "--json", data, "--sarif", sarif, "--markdown", note, kind="policy")
    require_writable(**outputs_of(options))
    run = Run(title="a run")
    assert finish(run, options, lambda: print("the report")) == 0
    assert "a run" in page.read_text()
    assert Run.load(data) == run
    assert json.loads(sarif.read_text())["version"] == "2.1.0"
    assert note.read_text().startswith("<!-- ampcheck policy ")
    assert sorted(tmp_path.iterdir()) == sorted([page, data, sarif, note])
    places = [f"page: {page}", f"JSON: {data}", f"SARIF: {sarif}", f"comment: {note}"]
    assert capfd.readouterr().out.splitlines() == ["the report", *places]


# In a job of GitHub Actions -------------------------------------------------------------------------------------------


def test_a_job_gets_annotations_after_the_report_and_a_part_of_its_summary(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, summary = Run(title="a run", findings=(OVERFLOW.fail("model", "too large"),)), tmp_path / "summary.md"
    summary.write_text("of an earlier step\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert finish(run, parsed(), lambda: print("the report")) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines == ["the report", "::error title=overflow%3A model::too large"]
    assert summary.read_text() == f"of an earlier step\n{comment_of(run)}\n"


def test_elsewhere_annotations_are_printed_on_request_and_no_summary_is_written(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = Run(findings=(OVERFLOW.fail("model", "too large"),))
    finish(run, parsed(), lambda: None)
    assert capfd.readouterr().out == ""
    finish(run, parsed("--github"), lambda: None)
    assert capfd.readouterr().out.startswith("::error ")


def test_a_summary_that_cannot_be_written_is_a_usage_error_after_report_and_annotations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "nowhere" / "summary.md"))
    with pytest.raises(UsageError, match=r"summary of the job cannot be written to \$GITHUB_STEP_SUMMARY"):
        finish(Run(findings=(OVERFLOW.fail("m", "x"),)), parsed("--github"), lambda: print("the report"))
    assert capfd.readouterr().out.splitlines() == ["the report", "::error title=overflow%3A m::x"]


def test_files_are_there_before_anything_is_printed_and_each_that_fails_is_named(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_output(parser)
    data = tmp_path / "run.json"
    options = parser.parse_args(["--html", str(tmp_path), "--json", str(data)])
    shown = []
    with pytest.raises(UsageError, match="cannot write") as raised:
        finish(Run(), options, lambda: shown.append(data.exists()))
    assert shown == [True]
    assert "\n" not in str(raised.value)


def test_an_error_of_the_report_itself_is_not_taken_for_one_of_stdout(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_output(parser)
    options = parser.parse_args([])

    def broken() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        finish(Run(), options, broken)


def test_two_links_to_one_file_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UsageError, match="need a file each"):
        require_writable(html=str(tmp_path / "file"), json=str(tmp_path / "link"))
