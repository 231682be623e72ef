"""The waist: what a check says survives the way to JSON, is written whole or not at all, and is raised once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import stat
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from runs import COVERAGES, FINDINGS, RUNS, SCALAR, TEXT

from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.core.errors import UsageError
from ampcheck.core.files import write_atomically
from ampcheck.core.run import (
    SCHEMA,
    SEVERITY,
    Band,
    Chart,
    Coverage,
    Finding,
    Run,
    Series,
    Table,
    Verdict,
    Where,
    collect,
    describe,
    emit,
    merge,
)
from ampcheck.core.text import clean
from ampcheck.outcome.raising import verify, with_test


def same(a: Any, b: Any) -> bool:
    """Equality of records in which NaN equals NaN, 1 differs from 1.0 and True, and 0.0 from -0.0."""
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def through_json(run: Run) -> Run:
    return Run.from_json(json.loads(json.dumps(run.to_json(), allow_nan=False)))


def finding(verdict: Verdict = Verdict.PASS, check: str = "overflow", **more: Any) -> Finding:
    return Finding(check, verdict, "model", "it must be finite", **more)


def failing(number: int) -> Finding:
    return finding(
        Verdict.FAIL, f"check-{number}", where=Where("forward", f"layer.{number}"), hint=f"turn knob {number}"
    )


# Through JSON.


@given(RUNS)
@example(Run(environment={"float": "nan"}))
@example(Run(environment={"float": math.nan}))
@example(Run(tables=(Table("t", ("float",), (("nan",), ('{"float": "nan"}',), (math.nan,), (-math.inf,))),)))
@example(Run(environment={"schema": 99, "findings": "x"}))
def test_every_run_survives_json(run: Run) -> None:
    assert same(through_json(run), run)


@given(RUNS)
def test_what_is_written_is_strict_json_that_is_stable(run: Run) -> None:
    text = json.dumps(run.to_json(), allow_nan=False)
    assert json.dumps(Run.from_json(json.loads(text)).to_json(), allow_nan=False) == text
    assert json.loads(text)["schema"] == SCHEMA


def test_the_comparison_of_this_file_tells_records_apart() -> None:
    assert same(Run(environment={"a": math.nan}), Run(environment={"a": math.nan}))
    for a, b in [(1, 1.0), (1, True), (0.0, -0.0), (math.nan, None), ("nan", math.nan), ((1,), (1, 2))]:
        assert not same(a, b), (a, b)
    assert not same(finding(Verdict.PASS), finding(Verdict.FAIL))


@pytest.mark.parametrize("kind", [dict, Counter, MappingProxyType], ids=lambda kind: kind.__name__)
def test_any_mapping_of_counts_may_be_a_coverage(kind: Any) -> None:
    run = Run(coverage=Coverage(kind({"ops": 3, "tensors": 2}), kind({"no float64": 1})), environment=kind({"a": 1}))
    assert same(through_json(run), run)


def test_a_run_prints_what_is_wrong_first_and_in_full() -> None:
    passed = Finding("flush", Verdict.PASS, "model", "nothing is flushed")
    failed = Finding("overflow", Verdict.FAIL, "model", "must stay finite", where=Where(module="up"), hint="scale")
    told = str(Run(findings=(passed, failed), coverage=Coverage({"sites": 2}))).splitlines()
    assert told == [
        "[overflow] fail: model: must stay finite",
        "  where: up",
        "  hint: scale",
        "[flush] pass: model: nothing is flushed",
        "looked at 2 sites",
    ]


def test_a_run_keeps_every_verdict_passes_too() -> None:
    run = Run(findings=tuple(finding(verdict) for verdict in Verdict))
    assert [f["verdict"] for f in run.to_json()["findings"]] == [str(verdict) for verdict in Verdict]
    assert [f.verdict for f in through_json(run).findings] == list(Verdict)


# Data that is no run.

CHARTED = Run(
    {"torch": "2"},
    (finding(where=Where("forward", line=3)),),
    Coverage({"ops": 1}, {"quiet": 2}),
    (Table("t", ("a",), ((1,),)),),
    (Chart("line", "c", "x", series=(Series("s", (1.0,), (2.0,)),), bands=(Band("b", 0.0, 1.0),)),),
    "title",
)
NOT_OURS = [
    None,
    5,
    "text",
    [],
    [1],
    {},
    {"a": 1},
    {"schema": "1"},
    {"schema": None},
    {"schema": 1.0},
    {"schema": True},
]


def one_sentence(message: str) -> bool:
    return bool(message.strip()) and "\n" not in message


@pytest.mark.parametrize("data", [*NOT_OURS, {"schema": 0}, {"schema": -1}], ids=repr)
def test_what_is_not_a_run_is_a_usage_error(data: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Run.from_json({**Run().to_json(), **data} if isinstance(data, dict) and "schema" in data else data)
    assert one_sentence(str(caught.value))


@pytest.mark.parametrize("ahead", [1, 41])
def test_a_newer_schema_says_to_update(ahead: int) -> None:
    with pytest.raises(UsageError, match=rf"{SCHEMA + ahead}.*update ampcheck") as caught:
        Run.from_json({**CHARTED.to_json(), "schema": SCHEMA + ahead})
    assert one_sentence(str(caught.value))


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index in the data, as a path."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [p for key, item in items for p in [(*path, key), *places(item, (*path, key))]]


def changed(data: dict[str, Any], path: tuple[Any, ...], change: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(data))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return copy


REQUIRED = [
    ("environment",),
    ("findings",),
    ("coverage",),
    ("tables",),
    ("charts",),
    *[("findings", 0, key) for key in ("check", "verdict", "subject", "message", "where")],
    *[("tables", 0, key) for key in ("title", "columns", "rows")],
    *[("charts", 0, key) for key in ("kind", "title", "x_label", "series", "bands")],
    *[("charts", 0, "series", 0, key) for key in ("label", "x")],
    *[("charts", 0, "bands", 0, key) for key in ("label", "low", "high")],
]


@pytest.mark.parametrize("path", REQUIRED, ids=str)
def test_a_missing_part_is_a_usage_error(path: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="damaged") as caught:
        Run.from_json(changed(CHARTED.to_json(), path, lambda holder, key: holder.pop(key)))
    assert one_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("environment",), 5),
        (("environment",), ["torch"]),
        (("findings",), 5),
        (("findings",), "abc"),
        (("findings", 0), None),
        (("findings", 0, "verdict"), "perhaps"),
        (("findings", 0, "verdict"), []),
        (("findings", 0, "where"), "here"),
        (("findings", 0, "where"), {"planet": "Mars"}),
        (("findings", 0, "extra"), 1),
        (("coverage",), None),
        (("coverage",), {"heard": {}}),
        (("tables",), {"a": 1}),
        (("tables", 0, "extra"), 1),
        (("charts", 0, "series"), 5),
        (("charts", 0, "series"), None),
        (("charts", 0), "line"),
    ],
    ids=str,
)
def test_a_part_of_the_wrong_shape_is_a_usage_error(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(UsageError, match="damaged") as caught:
        Run.from_json(changed(CHARTED.to_json(), path, lambda holder, key: holder.__setitem__(key, value)))
    assert one_sentence(str(caught.value))


def test_a_value_of_the_wrong_type_is_a_usage_error() -> None:
    wrong: list[tuple[tuple[Any, ...], Any]] = [
        (("title",), 5),
        (("findings",), {}),
        (("findings", 0, "check"), 5),
        (("findings", 0, "observed"), "much"),
        (("findings", 0, "where", "line"), "three"),
        (("coverage", "seen"), 5),
        (("coverage", "seen", "ops"), "many"),
        (("tables", 0, "rows"), 5),
        (("charts", 0, "series", 0, "x"), 5),
    ]
    accepted = []
    for path, value in wrong:
        with suppress(UsageError):
            Run.from_json(
                changed(CHARTED.to_json(), path, lambda holder, key, value=value: holder.update({key: value}))
            )
            accepted.append(path)
    assert accepted == []


def a_line(**more: Any) -> dict[str, Any]:
    return {"label": "s", "x": [1.0, 2.0], "y": [1.0, 2.0], **more}


TABLE, CHART, SERIES_OF = ("tables", 0), ("charts", 0), ("charts", 0, "series")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*TABLE, "rows"), [[1, 2]]),
        ((*TABLE, "rows"), [[]]),
        ((*TABLE, "rows"), [[1], []]),
        ((*TABLE, "rows"), ["a"]),
        ((*TABLE, "rows"), [[[1]]]),
        ((*TABLE, "rows"), [[{"a": 1}]]),
        ((*TABLE, "rows"), [[10**5000]]),
        ((*TABLE, "rows"), {"a": 1}),
        ((*TABLE, "columns"), []),
        ((*TABLE, "columns"), [1]),
        ((*TABLE, "columns"), {"a": 1}),
        ((*CHART, "kind"), "pie"),
        ((*CHART, "scale"), "log"),
        ((*CHART, "x_scale"), "cubic"),
        ((*CHART, "y_scale"), "cubic"),
        (SERIES_OF, [a_line(y=[1.0])]),
        (SERIES_OF, [a_line(y=[1.0, "2"])]),
        (SERIES_OF, [a_line(x=[1.0, True])]),
        (SERIES_OF, [a_line(x=[1.0, None])]),
        (SERIES_OF, [a_line(x=[1.0, 10**400])]),
        (SERIES_OF, [a_line(low=[1.0])]),
        (SERIES_OF, [a_line(low=[1.0, 2.0], high=[1.0])]),
        ((*CHART, "bands"), [{"label": "b", "low": 10**400, "high": 1}]),
        ((*CHART, "bands"), [{"label": "b", "low": None, "high": 1}]),
        (("environment",), {"torch": ["2"]}),
        (("environment",), {"torch": {"version": 2}}),
        (("coverage", "seen"), {"ops": -1}),
        (("coverage", "seen"), {"ops": 10**5000}),
        (("findings", 0, "observed"), 10**400),
        (("findings", 0, "seen"), True),
        (("findings", 0, "where", "step"), 10**5000),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "value",
)
def test_what_cannot_be_drawn_is_refused(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(UsageError, match="damaged") as caught:
        Run.from_json(changed(CHARTED.to_json(), path, lambda holder, key: holder.__setitem__(key, value)))
    assert one_sentence(str(caught.value))
    assert len(str(caught.value)) < 300


NAN, INF = {"float": "nan"}, {"float": "inf"}


@pytest.mark.parametrize(
    ("kind", "series", "fits"),
    [
        ("histogram", a_line(x=[0.0, 1.0, 2.0]), True),
        ("histogram", a_line(x=[], y=[]), True),
        ("histogram", a_line(), False),
        ("histogram", a_line(x=[0.0, NAN, 2.0]), False),
        ("histogram", a_line(x=[0.0, 1.0, INF]), False),
        ("histogram", a_line(x=[0.0, 2.0, 1.0]), False),
        ("range", a_line(x=[INF, NAN, 1.0, 2.0, 3.0], y=[]), True),
        ("range", a_line(x=[1.0] * 6, y=[]), False),
        ("line", a_line(x=[INF, NAN], low=[NAN, 1.0], high=[1.0, 2.0]), True),
    ],
)
def test_a_series_fits_its_kind_of_chart(kind: str, series: dict[str, Any], fits: bool) -> None:
    data = CHARTED.to_json()
    data["charts"][0] |= {"kind": kind, "series": [series]}
    if fits:
        assert Run.from_json(data).charts[0].kind == kind
    else:
        with pytest.raises(UsageError, match="damaged"):
            Run.from_json(data)


def test_data_that_nests_deep_is_a_usage_error() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for path in (("environment", "torch"), ("findings", 0, "check"), ("tables", 0, "rows")):
        data = CHARTED.to_json()
        holder = data
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = deep
        with pytest.raises(UsageError) as caught:
            Run.from_json(data)
        assert one_sentence(str(caught.value))


@given(st.data())
def test_damage_is_a_usage_error_or_no_damage_never_another_exception(data: st.DataObject) -> None:
    whole = CHARTED.to_json()
    path = data.draw(st.sampled_from(places(whole)))
    junk = data.draw(
        st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2))
    )
    broken = changed(whole, path, lambda holder, key: holder.__setitem__(key, junk))
    try:
        said = type(Run.from_json(broken)).__name__
    except UsageError as error:
        said = str(error)
    assert one_sentence(said)


# On disk.


@given(run=RUNS)
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, run: Run) -> None:
    path = tmp_path_factory.mktemp("saved") / "run.json"
    run.save(path)
    assert same(Run.load(path), run)
    assert os.listdir(path.parent) == ["run.json"]
    path.unlink()
    path.parent.rmdir()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b'{"schema": 1', b"[]", b"null", b"[" * 100_000],
    ids=["empty", "brace", "not UTF-8", "torn", "list", "null", "deep"],
)
def test_a_file_that_holds_no_run_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        Run.load(path)
    assert one_sentence(str(caught.value))


def test_a_missing_file_and_a_folder_are_usage_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(UsageError, match=path.name) as caught:
            Run.load(path)
        assert one_sentence(str(caught.value))


def test_a_missing_folder_is_a_usage_error_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*run\.json") as caught:
        Run().save(tmp_path / "absent" / "run.json")
    assert one_sentence(str(caught.value))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_way_is_a_usage_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        Run().save(tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("step", ["fdopen", "chmod", "replace"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stopped"]
)
def test_a_failing_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    path = tmp_path / "run.json"
    Run(title="old").save(path)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(UsageError if isinstance(error, OSError) else KeyboardInterrupt):
            Run(title="new").save(path)
    assert Run.load(path).title == "old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):  # a lone surrogate is no UTF-8: the stream breaks in the middle
        write_atomically(path, "n" * 100_000 + "\ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_reader_sees_the_old_run_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    runs = [Run(title=str(number) * 50_000) for number in range(2)]
    runs[0].save(path)
    done = threading.Event()

    def write() -> None:
        for number in range(40):
            runs[number % 2].save(path)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(Run.load(path).title)
    writer.join()
    assert seen <= {run.title for run in runs}


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_file_has_the_mode_of_an_ordinary_one(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Run().save(tmp_path / "run.json")
        (tmp_path / "ordinary").touch()
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    saved, ordinary = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run.json", "ordinary"))
    assert oct(saved) == oct(ordinary)


def test_a_bare_name_is_written_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Run(title="here").save("run.json")
    assert Run.load("run.json").title == "here"
    assert os.listdir(tmp_path) == ["run.json"]


# Who hears of a run.


def test_emit_without_a_collector_is_nothing() -> None:
    emit(Run(title="unheard"))
    with collect() as runs:
        pass
    emit(Run(title="late"))
    assert runs == []


def test_collectors_nest_and_each_sees_what_happens_within_it() -> None:
    with collect() as outer:
        emit(Run(title="1"))
        with collect() as inner:
            emit(Run(title="2"))
        emit(Run(title="3"))
    assert [run.title for run in outer] == ["1", "2", "3"]
    assert [run.title for run in inner] == ["2"]


def test_a_collector_ends_also_when_its_block_raises() -> None:
    with collect() as outer:
        with suppress(ZeroDivisionError), collect() as inner:
            emit(Run(title="kept"))
            raise ZeroDivisionError
        emit(Run(title="after"))
    assert [run.title for run in inner] == ["kept"]
    assert [run.title for run in outer] == ["kept", "after"]


def test_a_thread_does_not_leak_into_another() -> None:
    barrier = threading.Barrier(4)
    gathered: dict[int, list[str]] = {}

    def work(number: int) -> None:
        barrier.wait()
        with collect() as runs:
            barrier.wait()
            for _ in range(50):
                emit(Run(title=str(number)))
            barrier.wait()
        gathered[number] = [run.title for run in runs]

    with collect() as here:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        emit(Run(title="main"))
    assert gathered == {number: [str(number)] * 50 for number in range(4)}
    assert [run.title for run in here] == ["main"]


def test_a_task_does_not_leak_into_another() -> None:
    async def work(number: int) -> list[str]:
        with collect() as runs:
            for _ in range(3):
                emit(Run(title=str(number)))
                await asyncio.sleep(0)
        return [run.title for run in runs]

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(work(1), work(2)))

    assert asyncio.run(both()) == [["1"] * 3, ["2"] * 3]


# The one place that raises.


def test_verify_emits_before_it_raises() -> None:
    run = Run(findings=(failing(1),))
    with collect() as runs, pytest.raises(AssertionError):
        verify(run)
    assert runs == [with_test(run)]


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.FAIL])
def test_only_a_failure_raises(verdict: Verdict) -> None:
    run = Run(findings=(finding(verdict),))
    with collect() as runs:
        assert verify(run) == with_test(run)
    assert runs == [with_test(run)]
    assert not run.failed


def test_the_error_lists_every_failure_with_where_and_hint() -> None:
    run = Run(findings=(failing(1), finding(Verdict.WARN, "quiet", hint="unsaid"), failing(2), failing(3)))
    with pytest.raises(AssertionError) as caught:
        verify(run)
    for number in (1, 2, 3):
        for part in (f"[check-{number}]", f"forward, layer.{number}", f"turn knob {number}"):
            assert part in str(caught.value)
    assert "quiet" not in str(caught.value)


def test_verify_hides_its_frame(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from ampcheck.core.run import Finding, Run, Verdict
        from ampcheck.outcome.raising import verify
        def test_it():
            verify(Run(findings=(Finding("overflow", Verdict.FAIL, "model", "too large"),)))
        """
    )
    result = pytester.runpytest("-p", "no:ampcheck", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_verify_hides_its_frame.py:4: AssertionError"])
    result.stdout.no_fnmatch_line("*record.py*")


# How a finding and a place read.


@given(FINDINGS)
def test_a_description_has_check_verdict_message_place_and_hint(found: Finding) -> None:
    text = " ".join(describe(found).split())  # lines of a text are indented, so that none of them starts a line
    for part in (found.check, str(found.verdict), found.subject, found.message, str(found.where), found.hint):
        assert " ".join(clean(part).split()) in text


HOSTILE_NAME = "net\x1b[2J\x07\x9b31m\u202e\ud800"


def test_no_control_character_of_a_name_or_an_error_reaches_a_terminal_or_an_assertion() -> None:
    named = Finding(
        HOSTILE_NAME, Verdict.FAIL, HOSTILE_NAME, HOSTILE_NAME, Where(module=HOSTILE_NAME), hint=HOSTILE_NAME
    )
    run = Run(findings=(named,), coverage=Coverage({HOSTILE_NAME: 1}))
    with pytest.raises(AssertionError) as caught:
        verify(run)
    for text in (str(run), describe(named), str(caught.value)):
        text.encode()
        assert not set(text) & set("\x1b\x07\x9b\u202e\ud800")
        assert "net\\x1b[2J" in text


def test_a_place_names_what_is_known_and_nothing_else() -> None:
    assert str(Where()) == ""
    everything = Where("backward", "layers.0", "aten::mm", "model.py", 7, 0)
    assert str(everything) == "backward, layers.0, aten::mm, model.py:7, step 0"
    assert str(Where(line=7)) == ""
    assert str(Where(file="model.py")) == "model.py"


# Sums.


@given(COVERAGES, COVERAGES, COVERAGES)
@example(Coverage({"graphs": 0}), Coverage(), Coverage({"graphs": 0}))
def test_coverages_add_up_as_a_monoid(a: Coverage, b: Coverage, c: Coverage) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + Coverage() == a == Coverage() + a
    assert a + b == b + a
    assert (a + b).total == a.total + b.total


@given(COVERAGES, COVERAGES)
def test_a_sum_of_coverages_counts_each_sort(a: Coverage, b: Coverage) -> None:
    for total, one, other in (((a + b).seen, a.seen, b.seen), ((a + b).unseen, a.unseen, b.unseen)):
        assert total == {key: one.get(key, 0) + other.get(key, 0) for key in {*one, *other}}


@pytest.mark.parametrize(
    ("many", "one"),
    [
        ("losses", "loss"),
        ("compiled graphs", "compiled graph"),
        ("caches", "cache"),
        ("sets of modules tried", "set of modules tried"),
        ("ops beside float64", "op beside float64"),
        ("loss", "loss"),
    ],
)
def test_one_of_a_sort_is_told_in_the_singular(many: str, one: str) -> None:
    assert str(Coverage({many: 1})) == f"1 {one}"
    assert str(Coverage({many: 1000})) == f"1,000 {many}"


@given(COVERAGES, COVERAGES)
def test_adding_changes_neither(a: Coverage, b: Coverage) -> None:
    before = [dict(a.seen), dict(a.unseen), dict(b.seen), dict(b.unseen)]
    a + b
    assert [a.seen, a.unseen, b.seen, b.unseen] == before


@given(RUNS, RUNS, RUNS)
def test_runs_add_up(a: Run, b: Run, c: Run) -> None:
    both = a + b
    assert same(both.findings, (*a.findings, *b.findings))
    assert same(both.tables, (*a.tables, *b.tables))
    assert same(both.charts, (*a.charts, *b.charts))
    assert both.coverage == a.coverage + b.coverage
    assert both.title == (a.title or b.title)
    assert both.failed == (a.failed or b.failed)
    assert set(both.environment) == {*a.environment, *b.environment}
    assert same((a + b) + c, a + (b + c))
    assert same(merge([a, b, c]), a + b + c)


def test_the_merge_of_nothing_is_the_empty_run() -> None:
    assert merge([]) == Run()


@given(RUNS)
def test_findings_are_counted_and_chosen_by_verdict_worst_first(run: Run) -> None:
    counts = run.counts()
    assert sum(counts.values()) == len(run.findings)
    assert 0 not in counts.values()
    assert list(counts) == [verdict for verdict in SEVERITY if verdict in counts]
    for verdict in Verdict:
        chosen = run.of(verdict)
        assert len(chosen) == counts.get(verdict, 0)
        assert same(chosen, tuple(f for f in run.findings if f.verdict == verdict))


@given(RUNS, st.data())
def test_a_record_cannot_be_changed(run: Run, data: st.DataObject) -> None:
    pool = [run, run.coverage, *run.findings, *run.tables, *run.charts, *(f.where for f in run.findings)]
    target = data.draw(st.sampled_from(pool))
    name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(target)]))
    assume(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(target, name, None)


def test_a_pass_says_how_much_it_rests_on_and_nothing_looked_at_is_no_pass() -> None:
    kept = OVERFLOW.passed("model", "12 ops stayed finite", 12, observed=0, limit=0, unit="elements")
    assert (kept.verdict, kept.seen) == (Verdict.PASS, 12)
    assert through_json(Run(findings=(kept,))).findings == (kept,)
    empty = OVERFLOW.passed("model", "0 ops stayed finite", 0, observed=0, limit=0, unit="elements")
    assert (empty.verdict, empty.seen) == (Verdict.SKIP, 0)
    assert empty.message == "nothing to judge: 0 ops stayed finite"
    assert empty.observed is empty.limit is None
