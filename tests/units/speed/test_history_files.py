"""What breaks a file of the history loses no line but its own, and is told."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from history_records import day, record
from hypothesis import given, settings
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.speed.history.storage import append, load

TESTS = Path(__file__).parent


def the_file(folder: Path) -> Path:
    (file,) = folder.glob("*.jsonl")
    return file


def values(folder: Path) -> list[float]:
    return [value for series in load(folder).series for value in series.values]


@settings(max_examples=40)
@given(cut=st.integers(1, 2000), count=st.integers(1, 4), filler=st.sampled_from([b"", b"\0\0\0", b"\xff{"]))
def test_at_any_truncation_of_the_last_line_all_before_is_loaded_and_the_next_line_stands_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int, count: int, filler: bytes
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    for number in range(count):
        append(folder, [record(number + 1.0)], commit="", time=day(number))
    file = the_file(folder)
    *lines, last, _ = file.read_bytes().split(b"\n")
    torn = last[: len(last) - 1 - cut % (len(last) - 1)] + filler
    whole = b"".join(line + b"\n" for line in lines) + torn
    file.write_bytes(whole)

    kept = load(folder)
    before = [number + 1.0 for number in range(count - 1)]
    assert [value for series in kept.series for value in series.values] == before
    (note,) = kept.notes
    assert note.where == f"{file.name}, line {count}"
    assert "torn" in note.reason

    append(folder, [record(99.0)], commit="", time=day(50))
    assert values(folder) == [*before, 99.0]
    assert file.read_bytes().startswith(whole + b"\n")  # what was torn is still there, to the byte
    (note,) = load(folder).notes
    assert note.reason == "is damaged; it was left unchanged"


def test_a_last_line_that_lacks_nothing_but_its_end_is_a_line(tmp_path: Path) -> None:
    append(tmp_path, [record(1.0), record(2.0)], commit="", time=day(0))
    file = the_file(tmp_path)
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    append(tmp_path, [record(3.0)], commit="", time=day(1))
    assert sorted(values(tmp_path)) == [1.0, 2.0, 3.0]
    assert not load(tmp_path).notes


def test_lines_of_a_newer_schema_are_kept_and_told_and_not_judged(tmp_path: Path) -> None:
    append(tmp_path, [record(1.0)], commit="", time=day(0))
    file = the_file(tmp_path)
    newer = json.dumps({"schema": 2, "anything": [1]}) + "\n"
    file.write_text(newer + file.read_text(encoding="utf-8") + newer, encoding="utf-8")
    append(tmp_path, [record(2.0)], commit="", time=day(1))
    assert values(tmp_path) == [1.0, 2.0]
    (note,) = load(tmp_path).notes
    assert str(note) == (
        f"{file.name}: 2 lines of schema 2, newer than this ampcheck reads (1): not judged; update ampcheck"
    )
    assert file.read_text(encoding="utf-8").count(newer) == 2


def line_of(time: str = "2026-01-01T00:00:00+00:00", **changed: object) -> str:
    """A whole line, with what is changed of it."""
    return json.dumps(
        {"schema": 1, "time": time, "commit": "", "dirty": None, "record": {**record().to_dict(), **changed}}
    )


TIMES = {"name": "a", "seconds": 10**400, "precision": "", "fingerprint": {}}


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "1",
        '{"schema": 1}',
        '{"schema": 1, "time": "yesterday", "commit": "", "dirty": null, "record": {}}',
        '{"schema": 1, "time": "2026-01-01T00:00:00", "commit": "", "dirty": null, "record": {}}',
        '{"schema": 1, "time": "2026-01-01T00:00:00+00:00", "commit": "", "dirty": null, "record": {"schema": 9}}',
        '{"schema": 1, "time": "2026-01-01T00:00:00+00:00", "commit": "", "dirty": null, "times": {"name": "a"}}',
        '{"schema": 1, "time": "2026-01-01T00:00:00+00:00", "commit": 3, "dirty": null, "record": {}}',
        "[" * 100_000,
        '{"a":' * 900 + "1" + "}" * 900,
        line_of(time="0001-01-01T00:00:00+23:00"),
        line_of(time="9999-12-31T23:59:59-23:00"),
        line_of(ratio=10**400),
        line_of(low=10**400),
        line_of(reference_seconds=10**400),
        json.dumps({**json.loads(line_of()), "times": TIMES, "record": None}),
        json.dumps({**{k: v for k, v in json.loads(line_of()).items() if k != "record"}, "times": TIMES}),
        "<<<<<<< HEAD",
    ],
    ids=lambda line: f"{line[:70]} {zlib.crc32(line.encode())}",
)
def test_a_damaged_line_is_told_with_its_number_and_the_others_are_read(tmp_path: Path, line: str) -> None:
    append(tmp_path, [record(1.0)], commit="", time=day(0))
    file = the_file(tmp_path)
    file.write_text(line + "\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    assert values(tmp_path) == [1.0]
    (note,) = load(tmp_path).notes
    assert note.where == f"{file.name}, line 1"
    assert note.reason.endswith("it was left unchanged")


@pytest.mark.parametrize("at", [0, 1, 100])
def test_a_full_disk_is_told_in_one_sentence_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    append(tmp_path, [record(1.0)], commit="", time=day(0))
    before = the_file(tmp_path).read_bytes()
    write, written = os.write, []

    def full(handle: int, data: bytes) -> int:
        if not written and at:
            written.append(write(handle, data[:at]))
            return at
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(UsageError) as raised:
            append(tmp_path, [record(2.0)], commit="", time=day(1))
    assert "No space left on device; of 1 records 0 were added, and earlier ones are unchanged" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert the_file(tmp_path).read_bytes() == before
    append(tmp_path, [record(2.0)], commit="", time=day(1))
    assert values(tmp_path) == [1.0, 2.0]


def test_what_was_kept_before_the_disk_was_full_may_be_added_again_and_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [record(1.0), record(2.0, torch="2.13.0")]
    write = os.write

    def full(handle: int, data: bytes) -> int:
        if b"2.13.0" in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(UsageError, match="of 2 records 1 were added"):
            append(tmp_path, both, commit="", time=day(0))
    append(tmp_path, both, commit="", time=day(0))
    assert values(tmp_path) == [1.0, 2.0]


WRITER = """
import sys
from datetime import timedelta
sys.path.insert(0, sys.argv[1])
from history_records import day, record
from ampcheck.speed.history.storage import append
folder, who = sys.argv[2], int(sys.argv[3])
for number in range(25):
    made = [record(1.0 + who + number / 1000, name="x" * 3000), record(1.0 + who + number / 1000, torch="2.13.0")]
    append(folder, made, commit="", time=day(number))
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(TESTS), str(tmp_path)]
    writers = [subprocess.Popen([*command, str(who)], stderr=subprocess.PIPE) for who in range(4)]
    told = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 4, told
    kept = load(tmp_path)
    expected = sorted(1.0 + who + number / 1000 for who in range(4) for number in range(25))
    assert not kept.notes
    assert [sorted(series.values) for series in kept.series] == [expected, expected]


def test_a_system_without_locks_keeps_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    append(tmp_path, [record(1.0)], commit="", time=day(0))
    file = the_file(tmp_path)
    file.write_bytes(file.read_bytes() + b'{"torn')
    append(tmp_path, [record(2.0)], commit="", time=day(1))
    assert values(tmp_path) == [1.0, 2.0]


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_folder_that_cannot_be_read_is_one_sentence(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "history"
    if kind == "a file":
        place.write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"no history can be read from .*history: "):
        load(place)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"cannot add to the history .*; nothing was added"):
        append(tmp_path / "file" / "history", [record()], commit="")


def test_a_file_that_cannot_be_read_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    append(tmp_path, [record(1.0)], commit="", time=day(0))
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "notes.txt").write_text("not ours", encoding="utf-8")
    assert values(tmp_path) == [1.0]
    (note,) = load(tmp_path).notes
    assert note.where == "folder.jsonl"
    assert note.reason.startswith("cannot be read: ")
