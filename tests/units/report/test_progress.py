"""How far a long run is: words in a log, and none of a run that is soon over."""

from __future__ import annotations

import sys
import time

import pytest

from ampcheck.core import heartbeat
from ampcheck.report.progress import progress_bar


def test_a_log_gets_lines_during_a_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(heartbeat, "EVERY", 0.05)
    monkeypatch.setitem(sys.modules, "torch", sys)
    with progress_bar() as tell:
        tell("loading", 0, 2)
        time.sleep(0.2)
    said = capsys.readouterr()
    assert said.out == "", "stdout holds the report alone"
    assert said.err.startswith("ampcheck: 0 of 2 done, now: loading, 0 s\n")
    assert len(said.err.splitlines()) > 1


def test_what_imports_torch_is_said_before(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with progress_bar() as tell:
        tell("loading torch", 0, 2)
    assert capsys.readouterr().err == "ampcheck: 0 of 2 done, now: loading torch\n"


def test_a_short_run_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    with progress_bar() as tell:
        tell("the only stage", 0, 1)
    assert capsys.readouterr() == ("", "")
