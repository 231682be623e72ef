"""`ampcheck audit --profile` says where the time and memory of the audit went: by stage, and in it by function."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

import pytest

from ampcheck.cli.main import main
from ampcheck.cli.profile import Profile


def slow() -> None:
    time.sleep(0.6)


def quick() -> None:
    time.sleep(0.2)


def shares(lines: list[str]) -> dict[str, int]:
    """Percent by function."""
    return {found[2]: int(found[1]) for line in lines if (found := re.match(r" +(\d+)% █+ +(\S+)", line))}


def test_each_stage_has_its_seconds_its_memory_and_its_functions() -> None:
    profile = Profile()
    profile.begin("both")
    slow()
    quick()
    profile.begin("quick alone")
    quick()
    profile.end()
    lines = profile.lines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert [title.partition(":")[0] for title in titles] == ["both", "quick alone"]
    if sys.platform == "linux":
        assert all(re.search(r", at most [\d,]+ MiB$", title) for title in titles)
    both = shares(lines[: lines.index(titles[1])])
    assert 60 <= both["test_profile.py:slow"] <= 90
    assert 10 <= both["test_profile.py:quick"] <= 40


def test_the_stack_of_the_audit_is_sampled_and_not_that_of_other_threads() -> None:
    profile = Profile()
    profile.begin("stage")
    other = threading.Thread(target=slow)
    other.start()
    quick()
    profile.end()
    other.join()
    assert "test_profile.py:slow" not in shares(profile.lines())


def test_an_audit_prints_its_stages_and_ampchecks_own_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["audit", "--fast", "--dtype", "bfloat16", "--select", "overflow", "--profile"]) == 0
    printed = capsys.readouterr().out
    assert "demo: bfloat16, eager: " in printed
    assert re.search(r"% █+ +(numerics|shadow)/", printed)
    assert printed.index("demo: bfloat16, eager: ") < printed.index("audit of demo")
