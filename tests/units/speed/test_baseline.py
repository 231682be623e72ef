"""Comparison of speed records with those of earlier sessions; it warns at most."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ampcheck import UsageError, Verdict
from ampcheck.core.run import Finding
from ampcheck.records.speed import Baseline, SpeedRecord
from ampcheck.speed.baseline import EarlierHistory, baseline_of, check_baseline, check_missing, check_names
from ampcheck.speed.history.storage import append

HERE = {"device": "cpu (a)", "platform": "Linux-6", "threads": 2, "torch": "2.13.0", "python": "3.11.9"}


def record(ratio: float = 1.5, half: float = 0.01, **given: Any) -> SpeedRecord:
    known: dict[str, Any] = dict.fromkeys(("p05", "minimum"), ratio * 0.9)
    known |= {"name": "t.py::test_a", "reference": "eager", "arm": "compiled", "noise": 0.004, "cycles": 120}
    known |= {"ratio": ratio, "low": ratio - half, "high": ratio + half, "fingerprint": HERE}
    known |= {"reference_seconds": 0.015, "arm_seconds": 0.015 / ratio}
    return SpeedRecord(**{**known, **given})


def baseline(*records: SpeedRecord) -> Baseline:
    return baseline_of({"fullname": one.name, "extra_info": {"ampcheck": one.to_dict()}} for one in records)


def compared(new: SpeedRecord, *old: SpeedRecord, **given: Any) -> Finding:
    (finding,) = check_baseline([new], baseline(*old), **given)
    assert finding.check == "regression"
    assert finding.where.phase == "speed"
    assert finding.subject == new.name
    return finding


def test_a_benchmark_that_the_baseline_lacks_is_told_and_not_passed() -> None:
    finding = compared(record(), record(name="t.py::test_b"))
    assert finding.verdict is Verdict.WARN
    assert "the baseline has no benchmark of this name" in finding.message


def test_an_empty_baseline_lacks_every_benchmark() -> None:
    assert compared(record()).verdict is Verdict.WARN


def test_an_arm_that_the_baseline_lacks_is_told() -> None:
    finding = compared(record(), record(arm="autotuned"))
    assert finding.verdict is Verdict.WARN
    assert "no compiled against eager in its benchmark of this name, but autotuned against eager" in finding.message


def test_a_ratio_that_stays_passes() -> None:
    finding = compared(record(1.48), record(1.5))
    assert finding.verdict is Verdict.PASS
    assert "compiled is 1.48 (1.47 to 1.49) times as fast as eager, it was 1.5 (1.49 to 1.51)" in finding.message


@pytest.mark.parametrize(
    ("now", "fault"),
    [
        ({"reference_seconds": 0.0125, "arm_seconds": 0.010}, "eager is 20 % faster, compiled unchanged"),
        ({"reference_seconds": 0.0150, "arm_seconds": 0.012}, "compiled is 20 % slower, eager unchanged"),
        ({"reference_seconds": 0.0, "arm_seconds": 0.012}, "whose time moved is not known"),
    ],
)
def test_a_ratio_that_fell_is_a_warning_that_says_whose_fault_it_looks(now: dict[str, float], fault: str) -> None:
    finding = compared(record(1.25, **now), record(1.5))
    assert finding.verdict is Verdict.WARN
    assert fault in finding.message
    assert finding.observed == 1.25
    assert finding.limit == pytest.approx(1.5 / 1.075)


def test_a_ratio_that_rose_is_told_and_passes() -> None:
    finding = compared(record(1.8), record(1.5))
    assert finding.verdict is Verdict.PASS
    assert "so it rose" in finding.message


@pytest.mark.parametrize("ratio", [0.001, 0.1, 1.0, 1.2])
def test_no_stored_ratio_ever_fails(ratio: float) -> None:
    assert compared(record(ratio, half=0.0001), record(1.5)).verdict is Verdict.WARN


def test_a_fall_within_what_stored_ratios_wander_is_none() -> None:
    assert compared(record(1.41), record(1.5)).verdict is Verdict.PASS
    assert compared(record(1.3), record(1.5), effect=0.2).verdict is Verdict.PASS


def test_intervals_that_overlap_decide_nothing() -> None:
    assert compared(record(1.25, half=0.2), record(1.5, half=0.2)).verdict is Verdict.UNDECIDED


@pytest.mark.parametrize(("now", "half"), [(1.5, 0.6), (1.42, 0.05), (2.5, 1.2)])
def test_an_interval_that_reaches_below_the_limit_is_no_pass(now: float, half: float) -> None:
    finding = compared(record(now, half=half), record(1.5))
    assert finding.verdict is Verdict.UNDECIDED
    assert "too wide to decide" in finding.message


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"fingerprint": {**HERE, "device": "cpu (b)"}}, "device: cpu (b) and cpu (a)"),
        ({"fingerprint": {**HERE, "torch": "2.12.0"}}, "torch: 2.12.0 and 2.13.0"),
        ({"fingerprint": {}}, "torch: unknown and 2.13.0"),
        ({"precision": "bfloat16"}, "precision: bfloat16 and float32"),
        ({"noise": 0.3}, "the reference and its twin differed by 30 %"),
    ],
)
def test_what_was_measured_otherwise_is_not_comparable(changed: dict[str, Any], told: str) -> None:
    finding = compared(record(1.0), record(1.5, **changed))
    assert finding.verdict is Verdict.UNDECIDED
    assert finding.message.startswith("not comparable: ")
    assert told in finding.message


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, "has absolute times of this name, and no record of ampcheck"),
        ({"ampcheck": {"schema": 99}}, "has schema 99, newer than this ampcheck reads"),
        ({"ampcheck": {**record().to_dict(), "ratio": "fast"}}, "is damaged: ratio of a SpeedRecord cannot be 'fast'"),
        ({"ampcheck": 3}, "is no speed record of ampcheck"),
        ({"ampcheck": {**record().to_dict(), "low": 10**400}}, "is damaged: low of a SpeedRecord cannot be 1000"),
    ],
)
def test_a_benchmark_whose_record_cannot_be_read_is_not_comparable(extra: dict[str, Any], told: str) -> None:
    kept = baseline_of([{"fullname": record().name, "extra_info": extra}])
    (finding,) = check_baseline([record()], kept)
    assert finding.verdict is Verdict.UNDECIDED
    assert finding.message.startswith("not comparable: ")
    assert told in finding.message


def test_of_several_files_the_last_one_counts() -> None:
    assert compared(record(1.2), record(1.5), record(1.2)).verdict is Verdict.PASS
    assert compared(record(1.2), record(1.2), record(1.5)).verdict is Verdict.WARN


def test_benchmarks_that_did_not_run_are_told_once_with_their_names() -> None:
    kept = baseline(*(record(name=f"t.py::test_{number}") for number in range(8)))
    kept = replace(kept, records={**kept.records, "t.py::test_plain": ()})
    (finding,) = check_missing({"t.py::test_0"}, kept)
    assert finding.verdict is Verdict.WARN
    assert "did not run 7 of them: t.py::test_1, " in finding.message
    assert finding.message.endswith("test_5 and 2 more")
    assert "plain" not in finding.message
    assert check_missing(kept.known, kept) == []


# The history -----------------------------------------------------------------------------------------------------


def test_a_history_tells_the_names_that_it_lacks_and_nothing_of_those_it_has(tmp_path: Path) -> None:
    append(tmp_path, [record(1.5)], commit="")
    (finding,) = check_names([record(1.0), record(name="t.py::test_new")], EarlierHistory.load(tmp_path).all())
    assert (finding.subject, finding.verdict) == ("t.py::test_new", Verdict.WARN)
    assert "the history has no benchmark of this name" in finding.message


def test_an_empty_history_lacks_nothing(tmp_path: Path) -> None:
    assert check_names([record()], EarlierHistory.load(tmp_path).all()) == []
    assert check_missing([], EarlierHistory.load(tmp_path).last([record()])) == []


def test_a_history_of_other_hardware_is_not_comparable_and_other_releases_are(tmp_path: Path) -> None:
    append(tmp_path, [record(fingerprint={**HERE, "threads": 64})], commit="")
    (finding,) = check_names([record()], EarlierHistory.load(tmp_path).all())
    assert finding.verdict is Verdict.UNDECIDED
    assert (
        "not comparable: the history has this benchmark on other hardware only (threads: 64 and 2)" in finding.message
    )
    append(tmp_path, [record(fingerprint={**HERE, "torch": "2.14.0"})], commit="")
    assert check_names([record()], EarlierHistory.load(tmp_path).all()) == []


def test_what_the_last_session_on_this_hardware_ran_is_missed(tmp_path: Path) -> None:
    others = [record(name="t.py::test_gone"), record(name="t.py::test_a")]
    append(tmp_path, [record(name="t.py::test_old")], commit="", time=datetime(2026, 1, 1, tzinfo=timezone.utc))
    append(tmp_path, others, commit="", time=datetime(2026, 1, 2, tzinfo=timezone.utc))
    there = record(name="t.py::test_gpu", fingerprint={**HERE, "device": "cuda (b)"})
    append(tmp_path, [there], commit="", time=datetime(2026, 1, 3, tzinfo=timezone.utc))
    (finding,) = check_missing({"t.py::test_a"}, EarlierHistory.load(tmp_path).last([record()]))
    assert finding.message.endswith("did not run 1 of them: t.py::test_gone")


def test_what_cannot_be_read_of_a_history_is_told(tmp_path: Path) -> None:
    append(tmp_path, [record()], commit="")
    (file,) = tmp_path.glob("*.jsonl")
    with open(file, "a", encoding="utf-8") as stream:
        stream.write('{"schema": 1, "ti')
    before = EarlierHistory.load(tmp_path)
    assert len(before.points) == 1
    (note,) = before.notes
    assert "line 2" in note
    with pytest.raises(UsageError, match="no history can be read"):
        EarlierHistory.load(tmp_path / "nowhere")
