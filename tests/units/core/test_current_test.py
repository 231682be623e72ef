"""Findings of a test name it, and the command that runs it alone."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ampcheck.core.current_test import current_test, pytest_command
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.outcome.raising import verify


def test_the_id_is_that_of_pytest(request: pytest.FixtureRequest) -> None:
    assert current_test() == request.node.nodeid


@pytest.mark.parametrize("name", ["a b", "[x (call)]", "ü"])
def test_a_parameter_may_look_like_anything(request: pytest.FixtureRequest, name: str) -> None:
    assert current_test() == request.node.nodeid
    assert shlex.split(pytest_command(current_test())) == ["pytest", request.node.nodeid]


def test_outside_of_a_test_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert current_test() == ""


def test_the_command_works_below_the_root_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "test_a.py").touch()
    monkeypatch.chdir(tmp_path / "tests" / "unit")
    assert pytest_command("tests/test_a.py::test_x") == "pytest ../test_a.py::test_x"


def test_an_error_names_every_failure_and_the_command_that_finds_them(request: pytest.FixtureRequest) -> None:
    findings = tuple(Finding("overflow", Verdict.FAIL, f"model {i}", f"message {i}", hint="mend it") for i in range(40))
    with pytest.raises(AssertionError) as caught:
        verify(Run(findings=findings))
    lines = str(caught.value).split("\n")
    assert len(lines) == 20 + len(findings), "twenty lines for what matters most, and one for each failure"
    assert lines[:4] == [
        "[overflow] fail: model 0: message 0",
        "  hint: mend it",
        "",
        "[overflow] fail: model 1: message 1",
    ]
    command = f"pytest {request.node.nodeid}"
    assert lines[-2].startswith("shortened or left out: ")
    assert lines[-2].endswith(f" failures; `{command} --ampcheck -vv` shows all")
    assert lines[-1] == f"reproduce: {command}"
    assert all(any(f.message in line for line in lines) for f in findings)
