"""A history keeps any record, whatever its numbers and names, and loses nothing to torn, newer or damaged lines."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from history_records import MACHINE, day, record
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.records.history import History, Point
from ampcheck.records.speed import SpeedRecord
from ampcheck.speed.history.storage import append, load
from ampcheck.strategies import values

HOSTILE = [
    "float",
    "nan",
    "inf",
    "schema",
    "device",
    "threads",
    "\n",
    "\r\n",
    "\u2028",
    "\ud800",
    "\x00",
    "<<<<<<<",
    "",
]
names = st.sampled_from(HOSTILE) | st.text(max_size=12)
positive = values("float64", min_value=5e-324)
anything = values("float64", infinity=True, nan=True)
scalars = st.none() | st.booleans() | st.integers() | anything | names
UNWRITABLE = [{"float": word} for word in ("nan", "inf", "-inf")]
"""Fingerprints that look like a number of which JSON has none: they are refused."""
fingerprints = st.one_of(
    st.dictionaries(names, scalars, max_size=4).map(lambda more: {**MACHINE, **more}),
    st.dictionaries(st.sampled_from(["device", "platform", "threads", "float"]), scalars, max_size=3),
).filter(lambda known: known not in UNWRITABLE)
records = st.builds(
    SpeedRecord,
    name=names,
    reference=names,
    arm=names,
    ratio=positive,
    low=anything,
    high=anything,
    p05=anything,
    minimum=anything,
    noise=anything,
    cycles=st.integers(),
    confidence=values("float32"),
    precision=names,
    reference_seconds=anything,
    arm_seconds=anything,
    verdict=names,
    fingerprint=fingerprints,
)
times = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)).flatmap(
    lambda moment: st.integers(-23, 23).map(lambda h: moment.replace(tzinfo=timezone(timedelta(hours=h))))
)
entries = st.tuples(records, names, st.sampled_from([None, True, False]), times)
Entry = tuple[SpeedRecord, str, bool | None, datetime]


def plain(measured: Any, commit: str, dirty: bool | None, time: datetime) -> str:
    """An entry as text that tells any two apart, NaN, signs of zero and types included; no code of the history's."""
    held = measured.to_dict()
    return repr((sorted(held.items(), key=repr), commit, dirty, time.astimezone(timezone.utc).isoformat()))


def several(least: int, most: int) -> st.SearchStrategy[list[Entry]]:
    """Entries of which no two say the same: such count once."""

    def said(entry: Entry) -> str:
        return plain(*entry)

    return st.lists(entries, min_size=least, max_size=most, unique_by=said)


def in_one_file(given_entries: Sequence[Entry]) -> list[Entry]:
    """The same of one machine and precision, which share a file; those that then say the same once."""
    moved = [(replace(entry[0], fingerprint=MACHINE, precision="float32"), *entry[1:]) for entry in given_entries]
    return list({plain(*entry): entry for entry in moved}.values())


def at_once(given_entries: Sequence[Entry]) -> list[Entry]:
    """The same as points of one series, commit and moment."""
    same = {"name": "a", "reference": "b", "arm": "c"}
    return [(replace(entry[0], **same), "", entry[2], day(0)) for entry in in_one_file(given_entries)]


def kept(history: History) -> Counter[str]:
    points = [point for series in history.series for point in series.points]
    return Counter(plain(point.measured, point.commit, point.dirty, point.time) for point in points)


def add(folder: Path, given_entries: Sequence[Entry]) -> None:
    for measured, commit, dirty, time in given_entries:
        assert append(folder, [measured], commit=commit, dirty=dirty, time=time) == 1


def lines_of(folder: Path) -> list[bytes]:
    return [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_bytes().split(b"\n") if line]


def one_sentence(text: str) -> bool:
    return "\n" not in text and "Traceback" not in text and len(text) < 500


@given(st.lists(entries, max_size=5))
def test_any_record_comes_back_to_the_last_bit_and_once(tmp_path_factory: Any, given_entries: list[Entry]) -> None:
    folder = tmp_path_factory.mktemp("history")
    add(folder, given_entries)
    add(folder, given_entries[:2])  # again: it counts once
    if not given_entries:
        return
    history = load(folder)
    assert not history.notes
    assert kept(history) == Counter({plain(*entry) for entry in given_entries})
    for line in lines_of(folder):
        assert json.loads(line, parse_constant=pytest.fail)["schema"] == 1  # strict JSON: no NaN, no Infinity


@given(st.lists(entries, min_size=1, max_size=5), st.data())
def test_the_order_in_which_lines_and_files_are_merged_says_nothing(
    tmp_path_factory: Any, given_entries: list[Entry], data: st.DataObject
) -> None:
    folder, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    given_entries = data.draw(st.sampled_from([given_entries, at_once(given_entries)]))
    add(folder, given_entries)
    lines = lines_of(folder)
    lines = data.draw(st.permutations([*lines, *lines[: data.draw(st.integers(0, len(lines)))]]))
    cut, end = data.draw(st.integers(0, len(lines))), data.draw(st.sampled_from([b"\n", b"\r\n"]))
    (other / "b.jsonl").write_bytes(b"".join(line + end for line in lines[:cut]))
    (other / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in lines[cut:]))
    before, after = load(folder), load(other)
    assert kept(after) == kept(before)
    assert [repr(series.points) for series in after.series] == [repr(series.points) for series in before.series]
    assert [str(series.key) for series in after.series] == [str(series.key) for series in before.series]
    assert after.notes == before.notes == ()


@given(several(1, 4), entries, st.data())
def test_a_line_torn_at_any_byte_costs_itself_alone_and_is_told_in_one_sentence(
    tmp_path_factory: Any, given_entries: list[Entry], later: Entry, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    if data.draw(st.booleans()):
        given_entries, (later,) = in_one_file(given_entries), in_one_file([later])
    add(folder, given_entries)
    file = data.draw(st.sampled_from(sorted(folder.glob("*.jsonl"))))
    *whole, last, _ = file.read_bytes().split(b"\n")
    cut = data.draw(st.integers(1, len(last) - 1))
    torn = b"".join(line + b"\n" for line in whole) + last[:cut]
    complete = kept(load(folder))
    file.write_bytes(torn)

    history = load(folder)
    (note,) = history.notes
    assert note.where == f"{file.name}, line {len(whole) + 1}"
    assert "torn" in note.reason
    assert one_sentence(str(note))
    assert sum((complete - kept(history)).values()) == 1
    assert not kept(history) - complete

    before = kept(history)
    add(folder, [later])
    assert kept(load(folder)) == before | Counter([plain(*later)])
    assert len(load(folder).notes) == 1
    assert file.read_bytes().startswith(torn)


@given(st.lists(entries, max_size=3), st.lists(st.integers(2, 10**30), min_size=1, max_size=4), st.data())
def test_lines_of_any_newer_version_stay_are_told_once_and_take_nothing_along(
    tmp_path_factory: Any, given_entries: list[Entry], versions: list[int], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("newer")
    add(folder, given_entries)
    before = kept(load(folder))
    file = data.draw(st.sampled_from([*sorted(folder.glob("*.jsonl")), folder / "other.jsonl"]))
    there = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    newer = [json.dumps({"schema": version, "point": [1]}).encode() + b"\n" for version in versions]
    file.write_bytes(b"".join(data.draw(st.permutations([*there, *newer]))))
    history = load(folder)
    assert kept(history) == before
    assert len(history.notes) == len(set(versions))
    for version, count in Counter(versions).items():
        (note,) = (note for note in history.notes if f"schema {version}," in note.reason)
        assert note.reason.startswith(f"{count} line")
        assert note.where == file.name
        assert one_sentence(str(note))
    add(folder, [(record(7.0), "", None, day(0))])
    assert all(line in file.read_bytes() for line in newer)


@given(st.lists(st.lists(entries, max_size=3).map(in_one_file), min_size=2, max_size=4))
def test_writers_at_the_same_time_lose_nothing(tmp_path_factory: Any, shares: list[list[Entry]]) -> None:
    folder = tmp_path_factory.mktemp("threads")
    writers = [threading.Thread(target=add, args=(folder, share)) for share in shares]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    history = load(folder)
    assert not history.notes
    assert kept(history) == Counter({plain(*entry) for share in shares for entry in share})


# Damage -------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([10**400, -1, 0, 2]) | positive | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
) | st.sampled_from(
    [
        {"float": "nan"},
        {"float": "inf"},
        [{"float": "nan"}],
        {"device": [{"float": "nan"}]},
        {"threads": {"a": {"float": "inf"}}},
        [[["device"], 1]],
        [[1, 2], [None, {"float": "nan"}]],
        "2026-13-01",
    ]
)
TIMES = {"name": "test_a", "seconds": 0.5, "precision": "", "fingerprint": {"device": "cpu"}}


def places(value: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inside = value.items() if isinstance(value, dict) else ()
    return [*([at] if at else []), *(path for key, item in inside for path in places(item, (*at, key)))]


@given(damaged=st.sampled_from(["record", "times"]), value=JSON, data=st.data())
def test_a_line_in_which_anything_is_replaced_is_read_or_told_and_never_stops_the_others(
    tmp_path_factory: Any, damaged: str, value: Any, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    inside = record().to_dict() if damaged == "record" else TIMES
    line = copy.deepcopy({"schema": 1, "time": day(0).isoformat(), "commit": "a", "dirty": None, damaged: inside})
    path = data.draw(st.sampled_from(places(line)))
    part: Any = line
    for key in path[:-1]:
        part = part[key]
    if data.draw(st.integers(0, 4)):
        part[path[-1]] = value
    else:
        del part[path[-1]]
    add(folder, [(record(3.0, name="sound"), "", None, day(1))])
    (file,) = folder.glob("*.jsonl")
    file.write_bytes(json.dumps(line).encode() + b"\n" + file.read_bytes())

    history = load(folder)
    assert all(math.isfinite(x) and x > 0 for series in history.series for x in series.values)
    assert 3.0 in [x for series in history.series for x in series.values]
    assert len(history.notes) + history.points == 2
    assert all(one_sentence(str(note)) for note in history.notes)
    assert all(one_sentence(str(series.key)) or "\n" in str(line) for series in history.series)
    for series in history.series:  # what was read is plain data, that goes the same way again
        for point in series.points:
            assert all(
                held is None or isinstance(held, str | int | float) for held in point.measured.fingerprint.values()
            )
            assert repr(Point.from_dict(json.loads(json.dumps(point.to_dict())))) == repr(point)


ratios = st.floats(max_value=0) | st.sampled_from([math.inf, math.nan])
refused = ratios.map(record) | st.sampled_from(UNWRITABLE).map(lambda known: replace(record(), fingerprint=known))


@given(bad=refused, sound=st.lists(records, max_size=2))
def test_what_would_not_come_back_is_refused_and_nothing_is_written(
    tmp_path_factory: Any, bad: SpeedRecord, sound: list[SpeedRecord]
) -> None:
    folder = tmp_path_factory.mktemp("refused") / "history"
    with pytest.raises(UsageError) as raised:
        append(folder, [*sound, bad], commit="", time=day(0))
    assert one_sentence(str(raised.value))
    assert not folder.exists()
