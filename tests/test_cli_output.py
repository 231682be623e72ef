"""Where commands write: told before the work what cannot be written, and said where it lies afterwards."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ampcheck.cli_output import add_output, require_writable, write_output
from ampcheck.errors import UsageError
from ampcheck.record import Run


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
    write_output(Run(title="a run"), options, {"markdown": lambda path: Path(path).write_text("said")})
    assert "a run" in page.read_text()
    assert note.read_text() == "said"
    assert sorted(tmp_path.iterdir()) == sorted([page, note])
    assert capfd.readouterr().out.splitlines() == [f"page: {page}", f"markdown: {note}"]
