"""Promise: in a job of GitHub Actions each cause is an annotation at its line, and no text becomes a command."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from runs import HOSTILE_RUN, RUNS

from ampcheck.checks.range.headroom import CHECK as HEADROOM
from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.checks.range.precision_loss import CHECK as PRECISION_LOSS
from ampcheck.core.run import Finding, Run, Verdict, Where
from ampcheck.report.github import workflow_commands

HERE = Path(__file__).parent
COMMAND = re.compile(r"::(?P<name>error|warning|notice) (?P<properties>[^:\r\n]*)::(?P<data>[^\r\n]*)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory in a repository, with a file."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a, b.py").touch()
    monkeypatch.chdir(tmp_path / "sub")
    return tmp_path / "sub"


def overflow(file: str = "a, b.py", line: int | None = 3, message: str = "too large") -> Finding:
    return OVERFLOW.fail("m.py:f", message, where=Where(file=file, line=line), hint="scale it")


def annotated(folder: Path, *findings: Finding) -> list[str]:
    return list(workflow_commands(Run(findings=findings), folder))


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """A command as the runner reads it: name, properties, data."""

    def unescaped(text: str) -> str:
        for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
            text = text.replace(code, character)
        return text

    match = COMMAND.fullmatch(line)
    assert match is not None, line
    properties = dict(part.split("=", 1) for part in match["properties"].split(","))
    return match["name"], {name: unescaped(text) for name, text in properties.items()}, unescaped(match["data"])


def test_an_annotation_is_at_the_line_of_the_file_from_the_root_of_the_repository(folder):
    (line,) = annotated(folder, overflow())
    assert line == "::error title=overflow%3A m.py%3Af,file=sub/a%2C b.py,line=3::too large%0AHint: scale it"


@pytest.mark.parametrize("file", ["transformers/activations.py", "/etc/hosts", "..", "", "C:\\m.py", "\0", "\ud800"])
def test_a_file_outside_of_the_repository_is_not_named(folder, file):
    assert parsed(*annotated(folder, overflow(file)))[1] == {"title": "overflow: m.py:f"}


@pytest.mark.parametrize("line", [None, 0, -1])
def test_an_unknown_line_is_not_named(folder, line):
    assert "line" not in parsed(*annotated(folder, overflow(line=line)))[1]


def test_verdicts_have_their_commands_and_failures_come_first(folder):
    findings = [OVERFLOW.finding(v, "m", f"{v}") for v in reversed(Verdict) if v is not Verdict.PASS]
    assert [(name, data) for name, _, data in map(parsed, annotated(folder, *findings))] == [
        ("error", "fail"),
        ("warning", "warn"),
        ("notice", "undecided"),
        ("notice", "incomplete"),
    ]


def test_what_follows_from_a_cause_is_named_in_its_annotation_alone(folder):
    cause = overflow()
    followers = [replace(check.warn("m.py:f", "off"), cause=cause.key) for check in (PRECISION_LOSS, HEADROOM)]
    (line,) = annotated(folder, *followers, cause)
    assert parsed(line)[2].endswith("it explains precision-loss, headroom")


@given(run=RUNS)
@example(run=HOSTILE_RUN)
def test_of_any_run_each_line_is_one_command_of_a_length_that_github_takes(run):
    for line in workflow_commands(run, HERE):
        _, properties, data = parsed(line)
        assert "\n" not in line
        assert all(character.isprintable() or character in "\n\t" or ord(character) > 0x9F for character in data)
        assert len(data) <= 2_000
        assert properties.keys() <= {"title", "file", "line"}
        line.encode()
