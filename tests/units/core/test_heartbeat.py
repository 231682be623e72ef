"""A long step is reported every few seconds, and a short one never."""

from __future__ import annotations

import time

from ampcheck.core.heartbeat import EVERY, Heartbeat


def test_a_long_step_is_reported_again_and_again_with_its_seconds() -> None:
    lines: list[str] = []
    with Heartbeat(lines.append, "loading", every=0.05) as heartbeat:
        time.sleep(0.2)
        heartbeat.step("compiling")
        time.sleep(0.2)
    assert {line.partition(",")[0] for line in lines} == {"loading", "compiling"}
    assert len(lines) >= 4
    assert all(line.endswith(" s") for line in lines)


def test_short_steps_in_a_row_are_no_silence_either() -> None:
    lines: list[str] = []
    with Heartbeat(lines.append, every=0.1) as heartbeat:
        for number in range(10):
            heartbeat.step(f"step {number}")
            time.sleep(0.05)
    assert lines


def test_what_ends_soon_is_not_reported() -> None:
    lines: list[str] = []
    with Heartbeat(lines.append, "quick"):
        pass
    time.sleep(0.05)
    assert lines == []


def test_a_step_aloud_is_reported_at_once_and_counts_as_a_line() -> None:
    lines: list[str] = []
    with Heartbeat(lines.append, every=60) as heartbeat:
        heartbeat.step("reading", aloud=True)
    assert lines == ["reading"]


def test_a_busy_machine_leaves_less_than_five_seconds_of_silence() -> None:
    assert EVERY <= 4
