"""A history keeps what it is given, in series that no two machines share."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from history_records import MACHINE, commit, day, history, record
from hypothesis import given, settings
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.records.history import History, Point
from ampcheck.records.speed import SpeedRecord
from ampcheck.speed.history.storage import append, commit_of, load

names = st.text(min_size=1, max_size=20)
numbers = st.floats(min_value=1e-6, max_value=1e6)
anything = st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | anything | names
records = st.builds(
    SpeedRecord,
    name=names,
    reference=names,
    arm=names,
    ratio=numbers,
    low=anything,
    high=anything,
    p05=numbers,
    minimum=numbers,
    noise=anything,
    cycles=st.integers(0, 10**9),
    precision=names,
    fingerprint=st.dictionaries(names, scalars, max_size=4),
)


def points_of(kept: History) -> list[Point]:
    return [point for series in kept.series for point in series.points]


@settings(max_examples=40)
@given(given_records=st.lists(records, max_size=6, unique_by=lambda one: (one.name, one.arm)))
def test_whatever_is_appended_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, given_records: list[SpeedRecord]
) -> None:
    folder = tmp_path_factory.mktemp("history")
    assert append(folder, given_records, commit="abc", dirty=True, time=day(0)) == len(given_records)
    kept = load(folder)
    assert not kept.notes
    found = points_of(kept)
    assert sorted(map(repr, (point.measured for point in found))) == sorted(map(repr, given_records))
    assert all((point.commit, point.dirty, point.time) == ("abc", True, day(0)) for point in found)


def test_points_stand_in_the_order_of_their_times_whatever_the_order_of_lines(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        append(tmp_path, [record(number)], commit="", time=day(number))
    (series,) = load(tmp_path).series
    assert series.values == [1, 2, 3]


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cpu (Other CPU, 2 logical cores)"},
        {"threads": 4},
        {"platform": "Windows-10"},
        {"name": "train"},
        {"arm": "max-autotune"},
        {"reference": "base"},
        {"precision": "bfloat16"},
    ],
    ids=lambda other: "-".join(other),
)
def test_hardware_benchmarks_arms_and_precisions_are_never_mixed(tmp_path: Path, other: dict[str, object]) -> None:
    append(tmp_path, [record(), record(**other)], commit="", time=day(0))
    kept = load(tmp_path)
    assert [len(series.points) for series in kept.series] == [1, 1]
    assert len({str(series.key) for series in kept.series}) == 2


def test_a_release_of_torch_and_a_new_kernel_stay_in_the_series_and_are_told(tmp_path: Path) -> None:
    append(tmp_path, [record()], commit="", time=day(0))
    append(tmp_path, [record(torch="2.13.0")], commit="", time=day(1))
    append(tmp_path, [record(torch="2.13.0", platform="Linux-6.2.0")], commit="", time=day(2))
    (series,) = load(tmp_path).series
    assert series.releases() == [
        (1, [("torch", "2.12.0", "2.13.0")]),
        (2, [("platform", "Linux-6.1.0", "Linux-6.2.0")]),
    ]


def test_each_kind_of_machine_and_version_has_a_file_and_git_keeps_both_sides(tmp_path: Path) -> None:
    append(tmp_path, [record(), record(torch="2.13.0"), record(name="train")], commit="", time=day(0))
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert "merge=union" in (tmp_path / ".gitattributes").read_text(encoding="utf-8")


def test_files_may_be_joined_shuffled_renamed_and_copied(tmp_path: Path) -> None:
    append(tmp_path / "a", [record(i + 1.0, torch=f"2.{i % 3}") for i in range(9)], commit="", time=day(0))
    lines = [
        line for file in (tmp_path / "a").glob("*.jsonl") for line in file.read_text(encoding="utf-8").splitlines()
    ]
    random.Random(0).shuffle(lines)
    other = tmp_path / "b"
    other.mkdir()
    (other / "merged.jsonl").write_text("\n".join(lines[:6]) + "\n", encoding="utf-8")
    (other / "windows.jsonl").write_bytes(("\r\n".join(lines[3:]) + "\r\n").encode())
    assert load(other) == load(tmp_path / "a")


def test_times_need_a_time_zone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="time zone"):
        append(tmp_path, [record()], time=day(0).replace(tzinfo=None))


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_what_would_not_be_read_back_is_refused_before_anything_is_written(tmp_path: Path, ratio: float) -> None:
    with pytest.raises(UsageError, match="a ratio or a time cannot be"):
        append(tmp_path / "new", [record(), replace(record(), ratio=ratio)], commit="")
    assert not (tmp_path / "new").exists()


def test_nothing_to_append_makes_nothing(tmp_path: Path) -> None:
    assert append(tmp_path / "new", [], commit="") == 0
    assert not (tmp_path / "new").exists()


def test_a_point_says_its_commit_as_people_write_it() -> None:
    point = history([1.0]).series[0].points[0]
    assert point.commit_text == commit(0)[:10]
    assert replace(point, dirty=True).commit_text.endswith("+")
    assert replace(point, commit="", dirty=None).commit_text == "unknown commit"


# The commit -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))

    def run(*command: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    run("init", "-q")
    (tmp_path / "model.py").write_text("x = 1\n", encoding="utf-8")
    run("add", "model.py")
    run("commit", "-q", "-m", "one")
    return run


def test_the_commit_and_changes_of_the_working_tree_are_kept(
    git: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    append("speed", [record()])
    (tmp_path / "model.py").write_text("x = 2\n", encoding="utf-8")
    append("speed", [record()])
    (series,) = load("speed").series
    assert [point.commit for point in series.points] == [git("rev-parse", "HEAD")] * 2
    assert [point.dirty for point in series.points] == [False, True]


def test_a_history_that_git_tracks_makes_no_tree_dirty(git: Callable[..., str], tmp_path: Path) -> None:
    append(tmp_path / "speed", [record()], commit="")
    git("add", "speed")
    git("commit", "-q", "-m", "history")
    append(tmp_path / "speed", [record(2.0)], commit="")
    assert commit_of(tmp_path).dirty is True
    assert commit_of(tmp_path, besides=tmp_path / "speed").dirty is False


def test_branches_that_both_measured_are_merged_without_a_conflict(git: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "speed"
    append(folder, [record(1.0)], commit="", time=day(0))
    git("add", "speed")
    git("commit", "-q", "-m", "history")
    git("checkout", "-q", "-b", "other")
    append(folder, [record(2.0)], commit="", time=day(1))
    git("commit", "-q", "-a", "-m", "other")
    git("checkout", "-q", "main")
    append(folder, [record(3.0)], commit="", time=day(2))
    git("commit", "-q", "-a", "-m", "mine")
    git("merge", "-q", "-m", "both", "other")
    kept = load(folder)
    assert kept.series[0].values == [1.0, 2.0, 3.0]
    assert not kept.notes


def test_without_git_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    known = commit_of(tmp_path)
    assert (known.name, known.dirty) == ("", None)


def test_the_machine_is_in_the_name_of_a_series() -> None:
    text = str(history([1.0]).series[0].key)
    assert text == f"decode [compiled against eager, float32, {MACHINE['device']}, 2 threads, Linux]"
