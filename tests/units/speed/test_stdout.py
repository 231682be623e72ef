"""A stdout that is full or closed loses no file and no verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from history_records import commit, day, record

from ampcheck.core.run import Run
from ampcheck.speed.history.storage import append

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full and no sh here")


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two histories, in `steady/speed` and `slower/speed`."""
    place = tmp_path_factory.mktemp("histories")
    for kind, factor in (("steady", 1.0), ("slower", 0.9)):
        for number in range(45):
            ratio = (1.3 + 0.01 * ((number * 7) % 5 - 2) / 2) * (factor if number >= 38 else 1)
            append(place / kind / "speed", [record(ratio)], commit=commit(number), time=day(number))
    return place


def shell(line: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`line` in a shell, `ampcheck` being this interpreter's; a pipe ends as its first command does."""
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail; ampcheck() {{ "{sys.executable}" -m ampcheck "$@"; }}; {line}'],
        cwd=folder,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=120,
    )


FULL, GONE, CLOSED, OPEN = ">/dev/full", "| true", ">&-", ""


@pytest.mark.parametrize(
    ("kind", "stdout", "code"),
    [
        ("steady", FULL, 3),
        ("slower", FULL, 1),
        ("slower", GONE, 1),
        ("steady", GONE, 0),
        ("steady", CLOSED, 0),
        ("slower", CLOSED, 1),
        ("slower", OPEN, 1),
    ],
)
def test_files_are_written_and_the_exit_code_is_that_of_the_verdict(
    histories: Path, tmp_path: Path, kind: str, stdout: str, code: int
) -> None:
    page, data = tmp_path / "page.html", tmp_path / "run.json"
    ended = shell(f"ampcheck history speed --fail -v --html {page} --json {data} {stdout}", histories / kind)
    assert Run.load(data).failed is (kind == "slower")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert ended.returncode == code, ended.stderr
    lost = "ampcheck: cannot print to stdout: No space left on device\n"
    assert ended.stderr == (lost if stdout == FULL else "")


@pytest.mark.parametrize(
    "command",
    [
        "explain",
        "formats",
        "policy show cuda --torch 2.6",
        "policy diff 2.6 2.9 --json",
        "lab --list",
    ],
)
def test_a_listing_that_does_not_fit_is_no_traceback(command: str, tmp_path: Path) -> None:
    full = shell(f"ampcheck {command} >/dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (3, "ampcheck: cannot print to stdout: No space left on device\n")
    gone = shell(f"ampcheck {command} | true", tmp_path)
    assert (gone.returncode, gone.stderr) == (0, "")


def test_numbers_of_closed_files_are_not_those_of_the_next_files(histories: Path, tmp_path: Path) -> None:
    ended = shell(f"ampcheck history speed --json {tmp_path}/run.json <&- >&- 2>&-", histories / "steady")
    assert ended.returncode == 0
    assert Run.load(tmp_path / "run.json").findings


def test_a_stdout_without_unicode_gets_escapes(histories: Path, tmp_path: Path) -> None:
    ended = shell("ampcheck history speed -v", histories / "steady", PYTHONIOENCODING="ascii:strict")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii()


def test_a_file_that_cannot_be_written_loses_neither_the_report_nor_the_other_file(
    histories: Path, tmp_path: Path
) -> None:
    ended = shell(f"ampcheck history speed --html /dev/full --json {tmp_path}/run.json", histories / "steady")
    assert ended.returncode == 2
    assert "cannot write /dev/full: No space left" in ended.stderr
    assert "decode" in ended.stdout
    assert Run.load(tmp_path / "run.json").findings


def test_json_on_stdout_stands_before_the_report(histories: Path, tmp_path: Path) -> None:
    ended = shell(f"ampcheck history speed --json /dev/fd/1 > {tmp_path}/out", histories / "steady")
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "out").read_text()
    assert text.startswith("{")
    assert text.endswith("JSON: /dev/fd/1\n")
