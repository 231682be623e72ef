"""`ampcheck history DIR`: 0 where it was read, steps or not; 2 for a usage error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from history_records import commit, day, record

from ampcheck.cli.main import main
from ampcheck.cli.output import USAGE
from ampcheck.core.run import Run, Verdict
from ampcheck.speed.history.storage import append, load


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")

    def run(*arguments: str) -> Said:
        return Said(main(["history", *arguments]), *capsys.readouterr())

    return run


def a_year(folder: str = "speed", *, step: float = 0.9) -> None:
    for number in range(45):
        ratio = 1.3 + 0.01 * ((number * 7) % 5 - 2) / 2
        append(folder, [record(ratio * (step if number >= 38 else 1))], commit=commit(number), time=day(number))


def test_a_step_is_a_warning_and_zero_with_tables_a_page_and_json(told: Any) -> None:
    a_year()
    said = told("speed", "--html", "page.html", "--json", "run.json")
    assert said.code == 0
    assert "history speed: 1 warning" in said.out
    assert "the ratio fell by" in said.out
    assert commit(37)[:10] in said.out
    assert "Steps" in said.out
    assert Run.load("run.json").charts[0].markers[0].group == "step"
    page = Path("page.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "times faster than eager" in page


def test_the_minimum_effect_can_be_chosen(told: Any) -> None:
    a_year()
    assert "1 warning" in told("speed", "--effect", "5").out
    assert "1 passed" in told("speed", "--effect", "50").out


def test_imports_are_counted_and_added_once(told: Any) -> None:
    data = {
        "machine_info": {"system": "Linux"},
        "commit_info": {},
        "datetime": day(0).isoformat(),
        "benchmarks": [
            {"name": "a", "fullname": "a", "extra_info": {"ampcheck": record().to_dict()}, "stats": {"median": 1}},
            {"name": "b", "fullname": "b", "extra_info": {"ampcheck": {"schema": 9}}, "stats": {"median": 1}},
        ],
    }
    Path("stored.json").write_text(json.dumps(data), encoding="utf-8")
    said = told("new", "--import", "stored.json")
    assert "imported: 1 new, 0 known already" in said.out
    assert "not imported: stored.json, benchmark 2: was not imported" in said.out
    assert "imported: 0 new, 1 known already" in told("new", "--import", "stored.json").out
    assert load("new").points == 1


def test_a_step_fails_where_one_wants_that(told: Any) -> None:
    a_year()
    said = told("speed", "--fail", "--json", "run.json")
    assert said.code == 1
    assert "history speed: 1 failed" in said.out
    assert Run.load("run.json").findings[0].verdict is Verdict.FAIL
    a_year("steady", step=1.0)
    assert told("steady", "--fail").code == 0


def test_what_could_not_be_read_is_told(told: Any) -> None:
    a_year()
    (Path("speed") / "torn.jsonl").write_text('{"schema": 1, "ti', encoding="utf-8")
    said = told("speed")
    assert "not seen: lines or files that could not be read (1)" in said.out
    assert "torn.jsonl, line 1" in said.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "no history can be read from nowhere: No such file"),
        (("speed", "--html", "nowhere/page.html"), "there is no folder nowhere"),
        (("speed", "--json", "."), "it is a folder"),
        (("speed", "--html", "x", "--json", "./x"), "--html and --json need a file each, both are x"),
        (("speed", "--effect", "-1"), "--effect is per cent"),
        (("speed", "--effect", "nan"), "--effect is per cent"),
        (("speed", "--import", "nothing.json"), "cannot import nothing.json"),
    ],
)
def test_a_usage_error_is_one_sentence_and_writes_nothing(told: Any, arguments: tuple[str, ...], said: str) -> None:
    a_year()
    before = sorted(Path().rglob("*"))
    found = told(*arguments)
    assert (found.code, found.out, found.err.count("\n")) == (USAGE, "", 1)
    assert said in found.err
    assert sorted(Path().rglob("*")) == before
