"""Whatever an accident makes of a file that ampcheck reads, the outcome is a result or one sentence; and nothing that
cannot be read is overwritten.

Bytes are changed, cut, moved and joined; leaves of a whole file are replaced by others of any kind; keys stand twice;
texts nest deep, hold NUL, a BOM, half of a merge, or numbers without end.
"""

from __future__ import annotations

import copy
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from runs import HOSTILE_RUN, RUNS

from ampcheck.autocast.locks.file import NAME, LockFile, update
from ampcheck.autocast.policy import Snapshot
from ampcheck.checks import REGISTRY
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Band, Chart, Coverage, Finding, Marker, Run, Series, Table, Verdict, Where
from ampcheck.core.settings import load_settings
from ampcheck.records.policy import Locked, LockedOp, OpPolicy, Policy
from ampcheck.records.speed import SpeedRecord
from ampcheck.report import print_run, print_tables, render_html, summary_lines
from ampcheck.report.github import workflow_commands
from ampcheck.report.markdown import comment_of
from ampcheck.report.sarif import sarif_of
from ampcheck.speed.history.storage import append, import_benchmarks, load
from ampcheck.speed.trend.judge import trend_run

INF = math.inf
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
LOCK = LockFile(
    {
        "models.py:net": {
            "cuda/float16": Locked(
                "2.13.0",
                "cpu",
                {
                    "aten::mm": LockedOp("lower_precision", {"float32 float32 -> float16": (("up", "models.py:3"),)}),
                    "aten::exp": LockedOp("fp32", {"float16 -> float32": (("", "models.py:4"), ("", "models.py:9"))}),
                },
            )
        },
        "other": {"cpu/bfloat16": Locked("2.13.0", "cpu", {})},
    }
)
OPS = {
    "aten::mm": OpPolicy("lower_precision", {"float32 float32": "low"}, source="autocast_mode.cpp"),
    "aten::exp": OpPolicy("fp32", {"low": "float32"}, restores=True),
    "aten::bce": OpPolicy("banned", raises="is unsafe"),
}
POLICIES = {
    dtype: Policy("cuda", "2.13.0", (dtype,), ops, {"aten::x": "no schema"})
    for dtype, ops in (("float16", OPS), ("bfloat16", dict(list(OPS.items())[:2])))
}
SNAPSHOT = Snapshot("2.13.0", "cpu", "linux", "2026-01-01", {"cuda": POLICIES})
RUN = Run(
    {"torch": "2.13", "threads": 2, "fast": True, "share": 0.5, "none": None},
    (
        Finding("overflow", Verdict.FAIL, "net [float16]", "large", Where("forward", "up", "aten::mm", "m.py", 3, 1)),
        Finding("headroom", Verdict.WARN, "net [float16]", "near", observed=INF, limit=4.0, unit="times", hint="scale"),
        Finding("flush", Verdict.PASS, "net [bfloat16]", "none", seen=3),
        Finding("resume", Verdict.SKIP, "net [bfloat16]", "no loop"),
    ),
    Coverage({"ops": 3}, {"not compiled": 1}),
    (Table("errors", ("name", "error", "right"), (("up", math.nan, True), ("down", 3, None)), "overflow", "a note"),),
    (
        Chart("line", "loss", "step", "loss", (Series("a", (0.0, 1.0), (2.0, math.nan), "g", (1.0, 1.0), (3.0, 3.0)),)),
        Chart("range", "span", "2^x", series=(Series("up", (-INF, -3.0, 0.0, 1.0, 2.0)),), bands=(Band("f n", -4, 4),)),
        Chart("histogram", "bins", "2^x", series=(Series("b", (0.0, 1.0, 2.0), (4.0, 5.0)),), check="flush"),
        Chart("line", "log", "x", x_scale="log", y_scale="log", series=(Series("c", (1.0, 10.0), (1.0, 1e9)),),
              markers=(Marker("here", 2.0, "step"),), bands=(Band("band", 1.0, 5.0),)),
    ),
    "a run",
)  # fmt: skip
PYPROJECT = b"""[project]
name = "models"

[tool.ampcheck]

[tool.ampcheck.limits]
precision = 3.0
headroom = 8
"""


def history_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(24):
            record = SpeedRecord(
                "net", "eager", "compiled", 1.5, 1.4, 1.6, 1.3, 1.2, 0.004, 100, fingerprint={"device": "a"}
            )
            append(folder, [record], commit=f"{number:040x}", dirty=False, time=START + timedelta(days=number))
        (file,) = Path(folder).glob("*.jsonl")
        return file.read_bytes()


BENCHMARKS = json.dumps(
    {
        "machine_info": {"system": "Linux", "cpu": {"brand_raw": "a", "count": 2}, "python_version": "3.11"},
        "commit_info": {"id": "a" * 40, "dirty": False},
        "datetime": START.isoformat(),
        "benchmarks": [
            {"name": "a", "fullname": "t.py::a", "extra_info": {}, "stats": {"median": 0.5}},
            {"name": "b", "extra_info": {"ampcheck": json.loads(history_bytes().split(b"\n")[0])["record"]}},
        ],
    },
    indent=1,
).encode()  # fmt: skip


def saved(save: Callable[[Path], Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "file"))
        return Path(folder, "file").read_bytes()


SOUND = {
    "lock": LOCK.to_text().encode(),
    "snapshot": saved(SNAPSHOT.save),
    "run": saved(RUN.save),
    "history": history_bytes(),
    "benchmarks": BENCHMARKS,
    "pyproject": PYPROJECT,
}

# Damage ----------------------------------------------------------------------------------------------------------

JUNK = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\xe2\x80\xa8", b"\x1b[31m"),
    *(b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"0x" + b"f" * 400, b"-1e999", b"NaN", b"-Infinity"),
    *(b"null", b"{}", b"[]", b'"', b",", b"\\ud800", b'"""', b"a.a.a.a = 1\n", b"[tool.ampcheck]\n"),
    *(b"\n<<<<<<< HEAD\n", b"\n=======\n", b"\n>>>>>>> main\n"),
)
TEXT = st.sampled_from(["", "a", "nan", "inf", "\x1b[2J", "\ud800", "a\nb", "\u2028", "line", "0", "schema"]) | st.text(
    max_size=4
)
NUMBER = (
    st.sampled_from([0, -1, 1, 2, 5, 10**18, 10**400, -(10**400), 0.0, -0.0, 5e-324, 1e299, 1e308, -1e308])
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
TAGGED = st.sampled_from(["nan", "inf", "-inf", "x"]).map(lambda word: {"float": word})
LEAF = st.none() | st.booleans() | NUMBER | TAGGED | TEXT
TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
DEEP = st.integers(1, 200).map(lambda depth: json.loads("[" * depth + "]" * depth))


@st.composite
def damaged_bytes(draw: st.DrawFn, sound: bytes) -> bytes:
    data = sound
    for _ in range(draw(st.integers(1, 4))):
        a, b = sorted(draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data)))))
        way = draw(st.sampled_from(["flip", "insert", "delete", "truncate", "double", "move", "join", "junk"]))
        if way == "flip" and data:
            place = min(a, len(data) - 1)
            data = data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
        elif way == "insert":
            data = data[:a] + draw(st.binary(max_size=4)) + data[a:]
        elif way == "junk":
            data = data[:a] + draw(st.sampled_from(JUNK)) + data[a:]
        elif way == "delete":
            data = data[:a] + data[b:]
        elif way == "truncate":
            data = data[:a]
        elif way == "double":
            data = data[:b] + data[a:b] + data[b:]
        elif way == "move":
            data = data[b:] + data[:a] + data[a:b]
        else:
            data = data[:a] + sound[b:]
    return data


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and index in the data, as a path."""
    for key, item in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*path, key)
        yield from places(item, (*path, key))


@st.composite
def damaged_json(draw: st.DrawFn, sound: bytes) -> bytes:
    """JSON of the right shape, some of whose leaves, keys and lists are others."""
    data = json.loads(sound)
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(data))
        if not known:
            break
        *path, key = draw(st.sampled_from(known))
        holder = data
        for step in path:
            holder = holder[step]
        way = draw(st.sampled_from(["leaf", "leaf", "tree", "deep", "delete", "double", "borrow"]))
        if way == "delete":
            del holder[key]
        elif way == "double":
            if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            else:
                holder[draw(TEXT)] = copy.deepcopy(holder[key])
        elif way == "borrow":
            *path, other = draw(st.sampled_from(known))
            lender = data
            try:
                for step in path:
                    lender = lender[step]
                holder[key] = copy.deepcopy(lender[other])
            except (KeyError, IndexError, TypeError):
                holder[key] = None  # it went with what was deleted before
        else:
            holder[key] = draw({"leaf": LEAF, "tree": TREE, "deep": DEEP}[way])
    text = json.dumps(data)
    if draw(st.integers(0, 5)) == 0:  # a key twice, as after a merge
        at = text.find("{") + 1
        text = text[:at] + '"schema": 1, ' + text[at:]
    return text.encode()


def damaged(kind: str) -> st.SearchStrategy[bytes]:
    sound = SOUND[kind]
    if kind in ("pyproject", "history"):
        return damaged_bytes(sound)
    return damaged_bytes(sound) | damaged_json(sound)


@st.composite
def damaged_history(draw: st.DrawFn) -> bytes:
    """Lines of which some are damaged each in its own way."""
    lines = SOUND["history"].split(b"\n")[:-1]
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(lines) - 1))
        lines[number] = draw(damaged_json(lines[number]) if lines[number].startswith(b"{") else st.just(b"{"))
        lines[number] = lines[number] if lines[number].startswith(b"{") else b"{}"
    return b"\n".join(lines) + draw(st.sampled_from([b"\n", b"", b'\n{"torn']))


# What may come of it ---------------------------------------------------------------------------------------------


@contextmanager
def a_file(name: str, data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        yield path


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns; None after a `UsageError` of one line. Everything else that is raised fails the test."""
    try:
        return call()
    except UsageError as error:
        message = str(error)
        assert message.strip()
        assert "\n" not in message, message
        assert len(message) < 2000, message[:200]
        return None


def test_what_is_not_damaged_is_read() -> None:
    with a_file(NAME, SOUND["lock"]) as path:
        assert LockFile.load(path) == LOCK
    with a_file("s.json", SOUND["snapshot"]) as path:
        assert Snapshot.load(path) == SNAPSHOT
    with a_file("run.json", SOUND["run"]) as path:
        assert len(Run.load(path).charts) == 4
        rendered(Run.load(path))
    with a_file("a.jsonl", SOUND["history"]) as path:
        assert load(path.parent).points == 24
    with a_file("b.json", SOUND["benchmarks"]) as path:
        assert import_benchmarks(path.parent / "new", [path]).added == 2
    with a_file("pyproject.toml", SOUND["pyproject"]) as path:
        assert load_settings(path.parent).limits.precision == 3.0


@given(damaged("lock"))
def test_a_lock(data: bytes) -> None:
    with a_file(NAME, data) as path:
        held = outcome(lambda: LockFile.load(path))
        if held is not None:
            assert LockFile.from_text(held.to_text()).to_text() == held.to_text()
        done = outcome(lambda: update(path, "new", {"cpu/float16": Locked("2.13", "cpu", {})}) or True)
        assert (done is None) == (held is None)
        if held is None:
            assert path.read_bytes() == data  # what could not be read is not overwritten
        else:
            text = LockFile({**held.targets, "new": {"cpu/float16": Locked("2.13", "cpu", {})}}).to_text()
            assert path.read_text(encoding="utf-8") == text  # every other entry is kept
        assert [file.name for file in path.parent.iterdir()] == [NAME]


@given(damaged("snapshot"))
def test_a_snapshot(data: bytes) -> None:
    with a_file("s.json", data) as path:
        taken = outcome(lambda: Snapshot.load(path))
        assert path.read_bytes() == data
        if taken is not None:
            taken.save(path.with_name("again.json"))
            assert Snapshot.load(path.with_name("again.json")) == taken
            for device, held in taken.policies.items():
                for dtype in held:
                    assert taken.policy(device, dtype).counts() is not None


def rendered(run: Run) -> None:
    """All that is made of a run."""
    assert json.dumps(run.to_json(), allow_nan=False)
    assert "</html>" in render_html(run)
    for width in (40, 100):
        assert list(summary_lines(run, width=width, verbose=True))
    out = io.StringIO()
    print_run(run, Console(file=out, width=90), verbose=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        print_tables(run.tables)
    sarif = json.dumps(sarif_of(run, REGISTRY, Path.cwd()), allow_nan=False)
    for text in (str(run), out.getvalue(), comment_of(run), sarif, *workflow_commands(run, Path.cwd())):
        assert "\x1b" not in text
        text.encode()


@given(RUNS)
@example(HOSTILE_RUN)
def test_any_run_is_drawn_and_printed(run: Run) -> None:
    rendered(run)


@given(damaged("run"))
def test_a_run_that_is_accepted_is_drawn_printed_and_saved(data: bytes) -> None:
    with a_file("run.json", data) as path:
        run = outcome(lambda: Run.load(path))
        assert path.read_bytes() == data
        if run is not None:
            rendered(run)
            run.save(path)
            assert repr(Run.load(path)) == repr(run)  # NaN differs from itself


@given(damaged("history") | damaged_history(), st.booleans())
def test_a_history(data: bytes, drawn: bool) -> None:
    with a_file("a.jsonl", data) as path:
        history = outcome(lambda: load(path.parent))
        assert history is not None  # what cannot be read is a note
        assert all("\n" not in str(note) and len(str(note)) < 2000 for note in history.notes)
        if drawn:
            rendered(trend_run(history))
        before = history.points
        record = SpeedRecord("new", "eager", "compiled", 1.5, 1.4, 1.6, 1.3, 1.2, 0.004, 100)
        assert append(path.parent, [record], commit="", time=START) == 1
        assert path.read_bytes() == data
        assert load(path.parent).points == before + 1


@given(damaged("benchmarks"))
def test_what_is_imported_into_a_history(data: bytes) -> None:
    with a_file("b.json", data) as path:
        folder = path.parent / "history"
        done = outcome(lambda: import_benchmarks(folder, [path]))
        if done is None:
            assert not folder.exists()
        else:
            assert load(folder).points == done.added if folder.exists() else done.added == 0
            assert all("\n" not in str(note) for note in done.notes)


VALUES = st.sampled_from(
    [
        *("1", "-1", "nan", "inf", "1e400", "0x" + "f" * 4000, "9" * 5000, "true", '"a\\nb"', "{}", "{a = 1}", "[1]"),
        *("[" * 60 + "]" * 60, "[" * 5000 + "]" * 5000, "{a=" * 400 + "1" + "}" * 400),
        *("1979-05-27", "'\x1b'", '"""\na\n"""'),
    ]
)
KEYS = st.sampled_from(["precision", "headroom", "a" * 3000, '"a\\nb"', "a.b.c", '"\\u001b"', "limits", "precision.x"])


@st.composite
def damaged_pyproject(draw: st.DrawFn) -> bytes:
    tables = ["tool.ampcheck.limits", "tool.ampcheck", "tool", "[tool.ampcheck]", ".".join("a" * 2000), '"a\\nb"']
    lines = [PYPROJECT.decode()] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        lines += [f"[{draw(st.sampled_from(tables))}]"] if draw(st.booleans()) else []
        lines.append(f"{draw(KEYS)} = {draw(VALUES)}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


@given(damaged("pyproject") | damaged_pyproject())
def test_a_pyproject(data: bytes) -> None:
    with a_file("pyproject.toml", data) as path:
        limits = outcome(lambda: load_settings(path.parent).limits)
        if limits is not None:
            assert all(0 < getattr(limits, name) < INF for name in limits.__dataclass_fields__)
        assert path.read_bytes() == data
