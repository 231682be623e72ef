"""How far a long run is: words in a log, and none of a run that is soon over."""

from __future__ import annotations

import pytest

from ampcheck.report import progress
from ampcheck.report.progress import progress_bar


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 1.0, 9.0, 12.0, 13.0, 25.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress_bar() as tell:
        for number in range(5):
            tell(f"stage {number}", number, 5)
    said = capsys.readouterr()
    assert said.out == "", "stdout holds the report alone"
    assert said.err.splitlines() == [
        "ampcheck: 12 s, 2 of 5 done, now: stage 2",
        "ampcheck: 25 s, 4 of 5 done, now: stage 4",
    ]


def test_a_short_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as tell:
        tell("the only stage", 0, 1)
    assert capsys.readouterr() == ("", "")
