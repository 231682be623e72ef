"""Where commands write: told before the work what cannot be written, and said where it lies afterwards."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ampcheck.cli.output import add_output, finish, require_writable
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run


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


def test_what_is_asked_for_is_written_and_its_place_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_output(parser)
    parser.add_argument("--markdown")
    page, note = tmp_path / "page [bold].html", tmp_path / "note.md"
    options = parser.parse_args(["--html", str(page), "--markdown", str(note)])
    require_writable(html=options.html, json=options.json, markdown=options.markdown)
    writers = {"markdown": lambda path: Path(path).write_text("said")}
    assert finish(Run(title="a run"), options, lambda: print("the report"), more=writers) == 0
    assert "a run" in page.read_text()
    assert note.read_text() == "said"
    assert sorted(tmp_path.iterdir()) == sorted([page, note])
    assert capfd.readouterr().out.splitlines() == ["the report", f"page: {page}", f"markdown: {note}"]


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
