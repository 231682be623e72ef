"""Import of pytest-benchmark's JSON: ratios where our records are in it, times of which nothing is judged elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from history_records import commit, day, record

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict
from ampcheck.speed.history.storage import append, import_benchmarks, load
from ampcheck.speed.trend.judge import trend_run

MACHINE = {
    "node": "runner-17",
    "machine": "x86_64",
    "system": "Linux",
    "release": "6.1.0",
    "python_version": "3.11.7",
    "cpu": {"brand_raw": "Test CPU", "count": 2},
}


def stored(path: Path, *extra: object, number: int = 0, **changed: Any) -> Path:
    """A file as pytest-benchmark stores it, with a benchmark for each `extra_info['ampcheck']`; None: without one."""
    benchmarks = [
        {
            "name": f"test_{index}",
            "fullname": f"tests/test_speed.py::test_{index}",
            "extra_info": {} if item is None else {"ampcheck": item},
            "stats": {"median": 0.5 + index, "mean": 0.6},
        }
        for index, item in enumerate(extra)
    ]
    data = {
        "machine_info": MACHINE,
        "commit_info": {"id": commit(number), "dirty": True},
        "benchmarks": benchmarks,
        "datetime": day(number).isoformat(),
        "version": "5.0.0",
        **changed,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_our_records_become_ratios_with_commit_and_time(tmp_path: Path) -> None:
    both = [record(1.5).to_dict(), record(1.7, arm="max-autotune").to_dict()]
    file = stored(tmp_path / "a.json", both, record(1.2, name="train").to_dict())
    done = import_benchmarks(tmp_path / "h", [file])
    assert (done.added, done.known, done.notes) == (3, 0, ())
    kept = load(tmp_path / "h")
    assert {(series.key.name, series.key.arm): series.values for series in kept.series} == {
        ("decode", "compiled"): [1.5],
        ("decode", "max-autotune"): [1.7],
        ("train", "compiled"): [1.2],
    }
    point = kept.series[0].points[0]
    assert (point.commit, point.dirty, point.time) == (commit(0), True, day(0))


def test_without_our_records_times_are_kept_and_never_judged(tmp_path: Path) -> None:
    files = [stored(tmp_path / f"{number}.json", None, number=number) for number in range(40)]
    import_benchmarks(tmp_path / "h", files)
    kept = load(tmp_path / "h")
    (series,) = kept.series
    assert series.key.absolute
    assert series.values == [0.5] * 40
    assert "Test CPU" in series.key.device
    assert "runner-17" not in series.key.device
    (finding,) = trend_run(kept).findings
    assert finding.verdict is Verdict.SKIP
    assert finding.message.startswith("absolute times: no verdict")
    run = trend_run(kept)
    assert run.charts[0].y_label == "median time in ms"
    assert run.coverage.total == 0
    assert run.coverage.unseen == {"points that are absolute times: no verdict": 40}


def test_importing_twice_adds_nothing_twice(tmp_path: Path) -> None:
    first = stored(tmp_path / "storage" / "Linux" / "0001_a.json", record().to_dict(), None)
    assert import_benchmarks(tmp_path / "h", [first, first]).added == 2
    files = {file: file.read_bytes() for file in (tmp_path / "h").glob("*.jsonl")}
    stored(tmp_path / "storage" / "Linux" / "0002_a.json", record(2.0).to_dict(), number=1)
    again = import_benchmarks(tmp_path / "h", [tmp_path / "storage"])
    assert (again.added, again.known) == (1, 2)
    assert import_benchmarks(tmp_path / "h", [tmp_path / "storage"]).added == 0
    assert all(file.read_bytes().startswith(data) for file, data in files.items())
    assert load(tmp_path / "h").points == 3


def test_what_the_session_kept_itself_is_known_although_pytest_benchmark_noted_another_moment(tmp_path: Path) -> None:
    append(tmp_path, [record(1.5), record(1.7, arm="max-autotune")], commit=commit(0), dirty=False, time=day(1))
    both = [record(1.5).to_dict(), record(1.7, arm="max-autotune").to_dict()]
    done = import_benchmarks(tmp_path, [stored(tmp_path / "a.json", both)])
    assert (done.added, done.known) == (0, 2)
    assert load(tmp_path).points == 2


def test_the_same_figures_of_another_commit_are_another_point(tmp_path: Path) -> None:
    append(tmp_path, [record(1.5)], commit=commit(0), time=day(0))
    assert import_benchmarks(tmp_path, [stored(tmp_path / "a.json", record(1.5).to_dict(), number=1)]).added == 1


def test_times_of_a_benchmark_of_which_there_are_ratios_at_that_commit_are_known(tmp_path: Path) -> None:
    name = "tests/test_speed.py::test_0"
    append(tmp_path, [record(1.5, name=name)], commit=commit(0), time=day(0))
    done = import_benchmarks(
        tmp_path, [stored(tmp_path / "a.json", None, None), stored(tmp_path / "b.json", None, number=1)]
    )
    assert (done.added, done.known) == (2, 1)
    assert [(series.key.name, series.key.absolute, len(series.points)) for series in load(tmp_path).series] == [
        (name, False, 1),
        (name, True, 1),
        ("tests/test_speed.py::test_1", True, 1),
    ]


def test_equal_times_of_unknown_commits_are_two_points(tmp_path: Path) -> None:
    files = [stored(tmp_path / f"{n}.json", None, number=n, commit_info={}) for n in range(2)]
    assert import_benchmarks(tmp_path / "h", files).added == 2


@pytest.mark.parametrize(
    "changed",
    [{"ratio": 10**400}, {"low": 10**400}, {"minimum": 10**400}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_number_that_is_no_float_is_told_and_the_others_are_imported(tmp_path: Path, changed: dict[str, int]) -> None:
    file = stored(tmp_path / "a.json", {**record().to_dict(), **changed}, record().to_dict())
    done = import_benchmarks(tmp_path / "h", [file])
    assert (done.added, len(done.notes)) == (1, 1)
    far = stored(tmp_path / "far.json", record().to_dict(), datetime="0001-01-01T00:00:00+23:00")
    assert len(import_benchmarks(tmp_path / "h", [far]).notes) == 1


def test_what_pytest_wrote_itself_is_read(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)  # pytest-benchmark measures nothing where it sees them
    pytester.makepyfile(f"""
        def test_fast(benchmark):
            benchmark.extra_info["ampcheck"] = {record(1.5).to_dict()!r}
            benchmark.pedantic(lambda: None, rounds=2)

        def test_plain(benchmark):
            benchmark.pedantic(lambda: sum(range(1000)), rounds=2)
    """)
    done = pytester.runpytest_subprocess("--benchmark-json=out.json", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=2)
    assert import_benchmarks(tmp_path, [pytester.path / "out.json"]).added == 2
    ratios, times = load(tmp_path).series
    assert ratios.values == [1.5]
    assert times.key.name.endswith("::test_plain")


def test_a_benchmark_that_cannot_be_read_is_told_and_the_others_are_imported(tmp_path: Path) -> None:
    newer = {**record().to_dict(), "schema": 7}
    file = stored(tmp_path / "a.json", newer, {"schema": 1, "ratio": "fast"}, record().to_dict())
    done = import_benchmarks(tmp_path / "h", [file])
    assert done.added == 1
    assert [note.where for note in done.notes] == ["a.json, benchmark 1", "a.json, benchmark 2"]
    assert "schema 7, newer" in done.notes[0].reason


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmarks": []}', '{"benchmarks": 1, "machine_info": {}}'])
def test_a_file_that_is_none_of_pytest_benchmarks_adds_nothing_and_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    good = stored(tmp_path / "good.json", record().to_dict())
    with pytest.raises(UsageError, match=r"cannot import .*bad\.json: it is no JSON of pytest-benchmark"):
        import_benchmarks(tmp_path / "h", [good, tmp_path / "bad.json"])
    assert not (tmp_path / "h").exists()


def test_missing_files_and_empty_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot import .*none\.json: there is no such file"):
        import_benchmarks(tmp_path / "h", [tmp_path / "none.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="contains no JSON"):
        import_benchmarks(tmp_path / "h", [tmp_path / "empty"])


def test_a_project_without_git_has_no_commit(tmp_path: Path) -> None:
    file = stored(tmp_path / "a.json", None, commit_info={"id": "unversioned", "dirty": False})
    import_benchmarks(tmp_path / "h", [file])
    point = load(tmp_path / "h").series[0].points[0]
    assert (point.commit, point.dirty) == ("", None)


def test_imports_join_the_series_that_is_there(tmp_path: Path) -> None:
    append(tmp_path / "h", [record(1.0)], commit="", time=day(0))
    import_benchmarks(tmp_path / "h", [stored(tmp_path / "a.json", record(2.0).to_dict(), number=1)])
    (series,) = load(tmp_path / "h").series
    assert series.values == [1.0, 2.0]
