"""Promise: a verdict that changes is seen, whatever a case does to its process, and only a reason accepts it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ampcheck import UsageError
from ampcheck.core.arm import Arm
from ampcheck.core.run import Finding, Verdict, Where

EAGER = Arm(mode="eager")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("sys.argv", ["ledger"])
    return importlib.import_module("ledger")


@pytest.fixture
def rows(ledger: Any) -> Any:
    return importlib.import_module("_ledger_rows")


def row(
    rows: Any, case: str, *facts: tuple[str, str, str], seconds: float = 1.0, arm: str = "eager", **more: Any
) -> Any:
    arms = {arm: rows.Arm(sorted(facts), more.pop("passes", 0))}
    return rows.Row(more.pop("source", "corpus"), case, "buggy", seconds=seconds, arms=arms, **more)


def keyed(*all_rows: Any) -> dict[tuple[str, str], Any]:
    return {one.key: one for one in all_rows}


LOST, MOVED = ("overflow", "fail", "net.py:3"), ("overflow", "fail", "net.py:4")


# Differences ----------------------------------------------------------------------------------------------------------


def test_a_verdict_that_moves_is_lost_at_one_place_and_new_at_another(rows):
    found = rows.differences(keyed(row(rows, "a", LOST)), keyed(row(rows, "a", MOVED)), ())
    assert [str(d) for d in found] == [
        "+ a | buggy | eager: overflow fail net.py:4",
        "- a | buggy | eager: overflow fail net.py:3",
    ]


def test_a_verdict_that_is_gone_says_what_is_there_instead(rows):
    before, after = keyed(row(rows, "a", LOST)), keyed(row(rows, "a", passes=3))
    assert [str(d) for d in rows.differences(before, after, ())] == ["- a | buggy | eager: overflow fail net.py:3"]
    before, after = keyed(row(rows, "a", passes=3)), keyed(row(rows, "a"))
    assert [str(d) for d in rows.differences(before, after, ())] == ["- a | buggy | eager: passes"]


def test_numbers_of_passes_seconds_and_new_cases_are_no_difference(rows):
    before = keyed(row(rows, "a", LOST, passes=3, seconds=1.0))
    after = keyed(row(rows, "a", LOST, passes=2, seconds=9.0), row(rows, "b", LOST))
    assert rows.differences(before, after, ()) == []


def test_an_arm_and_a_case_that_are_no_longer_run_are_differences(rows):
    before = keyed(row(rows, "a", LOST, arm="compiled"), row(rows, "b"), row(rows, "c"))
    found = rows.differences(before, keyed(row(rows, "a", LOST, arm="eager")), {("b", "buggy")})
    assert [(d.sign, d.place) for d in found] == [
        ("-", "a | buggy | compiled"),
        ("+", "a | buggy | eager"),
        ("-", "b | buggy"),
    ]


def test_a_row_survives_its_file(rows, ledger, tmp_path):
    one = row(rows, "a", LOST, MOVED, passes=2, mechanisms=["stalled"])
    ledger.write(tmp_path / "ledger.json", keyed(one, row(rows, "b")))
    lines = (tmp_path / "ledger.json").read_text(encoding="utf-8").splitlines()
    assert sum('"case"' in line for line in lines) == 2
    assert next(iter(rows.read(tmp_path / "ledger.json").values())) == one


# Signatures -----------------------------------------------------------------------------------------------------------

SIGNED = """# Accepted

<!--
## An example
- `b | buggy | eager`
  - `- tf32 fail`
-->

## The line of the cast

- `a | buggy | *`
  - `- overflow fail net.py:3`
  - `+ overflow fail net.py:*`

## A law that went

- `gone | buggy | eager`
  - `+ flush fail`
"""


def signatures(rows: Any, folder: Path, text: str = SIGNED) -> Any:
    (folder / "signed.md").write_text(text, encoding="utf-8")
    return rows.read_signatures(folder / "signed.md")


def test_a_signature_accepts_what_it_names_and_one_that_accepts_nothing_is_stale(rows, tmp_path):
    found = rows.differences(keyed(row(rows, "a", LOST)), keyed(row(rows, "a", MOVED, ("flush", "warn", ""))), ())
    reasons, stale = rows.signed(found, signatures(rows, tmp_path))
    assert {d.fact: reason for d, reason in reasons} == {
        "overflow fail net.py:3": "The line of the cast",
        "overflow fail net.py:4": "The line of the cast",
        "flush warn": "",
    }
    assert [signature.reason for signature in stale] == ["A law that went"]


@pytest.mark.parametrize(
    "text", ["## Reason\n  - `- flush fail`\n", "- `a`\n  - `+ flush fail`\n", "## Reason\n- a | b\n"]
)
def test_a_signature_without_reason_or_case_is_refused(rows, tmp_path, text):
    with pytest.raises(ValueError, match=r"signed\.md:"):
        signatures(rows, tmp_path, text)


def test_the_signatures_of_the_repository_can_be_read(rows, ledger):
    assert isinstance(rows.read_signatures(ledger.SIGNED), list)


# The sample -----------------------------------------------------------------------------------------------------------


def test_the_sample_has_every_check_at_the_least_cost_and_then_each_sort(rows):
    fail = [(check, "fail", "") for check in ("overflow", "flush", "tf32")]
    everything = row(rows, "dear", *fail, seconds=50.0)
    cheap = row(rows, "cheap", *fail[:2], seconds=1.0)
    other = row(rows, "other", fail[2], seconds=2.0)
    silent = row(rows, "silent", seconds=0.5, source="loops", outcome="silent")
    taken = rows.cover([everything, cheap, other, silent], 10.0)
    assert set(taken) == {cheap.key, other.key, silent.key}
    assert rows.cover([everything, silent], 1.0) == [everything.key]  # no check is left out, whatever it costs
    assert rows.cover([], 10.0) == []


def test_the_sample_of_the_evidence_has_every_check_of_the_repositorys_own_cases(rows, ledger):
    known = rows.read(ledger.EVIDENCE)
    own = [one for one in known.values() if one.source in ("corpus", "training", "docs", "handwritten", "loops")]
    sample = rows.cover(own, ledger.QUICK_SECONDS)
    assert {check for key in sample for check in known[key].checks} == {check for one in own for check in one.checks}
    assert sum(known[key].seconds for key in sample) <= 1.1 * ledger.QUICK_SECONDS


# What a case does to its process --------------------------------------------------------------------------------------


def of(ledger: Any, run: Callable[[], Any], **more: Any) -> Any:
    cases = importlib.import_module("_ledger_cases")
    return cases.Case("corpus", more.pop("name", "case"), "buggy", run, **more)


def spin() -> Any:
    while True:
        time.process_time()


def by(error: BaseException) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


def test_whatever_ends_a_case_is_a_row_and_the_others_are_run(ledger):
    endings: dict[str, Callable[[], Any]] = {
        "raises": by(ValueError("at 0x7f12 in /tmp/a/b.py, 13 times\nmore")),
        "exits": by(SystemExit(3)),
        "refused": by(UsageError("no subject")),
        "dies": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "leaves": lambda: os._exit(0),
        "spins": spin,
        "works": lambda: [Finding("flush", Verdict.FAIL, "x [eager]", "", Where(file="net.py", line=3), arm=EAGER)],
    }
    cases = [of(ledger, run, name=name, seconds=1 if name == "spins" else 60) for name, run in endings.items()]
    found = {
        one.case: (one.outcome, [f for arm in one.arms.values() for f in arm.findings])
        for one in ledger.rows_of(cases, 2)
    }
    assert found == {
        "raises": ("crash", [("crash", "ValueError: at #x in b.py, # times", "")]),
        "exits": ("crash", [("crash", "SystemExit: #", "")]),
        "refused": ("refused", [("refused", "UsageError: no subject", "")]),
        "dies": ("crash", [("crash", "SIGSEGV", "")]),
        "leaves": ("crash", [("crash", "exit code 0", "")]),
        "spins": ("timeout", [("timeout", "1 s", "")]),
        "works": ("", [("flush", "fail", "net.py:3")]),
    }


def test_the_place_of_a_finding_is_the_same_in_every_checkout(ledger):
    def place(file: str) -> str:
        return str(ledger.place(Where(module="layer", file=file, line=3)))

    assert place(f"{ROOT}/tests/corpus/net.py") == "tests/corpus/net.py:3"
    assert place(f"{ROOT.parent}/shared/zoo/zoo.py") == "../shared/zoo/zoo.py:3"
    assert place("/somewhere/site-packages/timm/layers/norm.py") == "timm/layers/norm.py:3"
    assert place("/tmp/of-this-run/failing.py") == "failing.py:3"
    assert place(f"{ROOT}/ampcheck/training/loop.py") == "ampcheck/training/loop.py"
    assert place("") == "layer"


# The whole ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def planted(ledger: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A source of two cases; the line of the first one's finding can be changed."""
    line = {"overflow": 3}
    cases = importlib.import_module("_ledger_cases")
    monkeypatch.setattr(ledger, "imported", lambda cases: None)
    monkeypatch.chdir(ROOT)

    def some() -> Iterator[Any]:
        def defect() -> Any:
            return [
                Finding(
                    "overflow", Verdict.FAIL, "x [eager]", "", Where(file="net.py", line=line["overflow"]), arm=EAGER
                )
            ]

        here = cases.Expected(("overflow",), lambda finding: finding.where.line == 3)
        yield of(ledger, defect, name="defect", expected=here)
        yield of(ledger, list, name="control", expected=cases.HEALTHY)
        yield of(ledger, list, name="absent", needs=("no_such_package",))

    monkeypatch.setattr(cases, "SOURCES", {"corpus": some})
    return line


def test_a_planted_difference_is_printed_and_ends_with_1_until_it_is_signed(
    ledger, planted, tmp_path, monkeypatch, capsys
):
    before = tmp_path / "before.json"
    monkeypatch.setattr(ledger, "SIGNED", tmp_path / "signed.md")
    assert ledger.main(["--json", str(before)]) == 0
    assert [one["outcome"] for one in json.loads(before.read_text(encoding="utf-8"))["rows"]] == ["at", "silent"]
    assert "| corpus | 2 |" in before.with_suffix(".md").read_text(encoding="utf-8")
    assert ledger.main(["--against", str(before)]) == 0
    capsys.readouterr()

    planted["overflow"] = 4
    assert ledger.main(["--against", str(before)]) == 1
    printed = capsys.readouterr().out
    assert "1 elsewhere, 1 silent" in printed
    assert "- defect | buggy | eager: overflow fail net.py:3\n" in printed
    assert "+ defect | buggy | eager: overflow fail net.py:4\n" in printed
    assert ledger.main(["--quick", "--against", str(before)]) == 1
    assert ledger.main(["--only", "control", "--against", str(before)]) == 0

    changes = "- overflow fail *:3", "+ overflow fail *:4", "+ flush fail"
    change = "\n".join(("## Moved", "- `defect | buggy | eager`", *(f"  - `{text}`" for text in changes)))
    (tmp_path / "signed.md").write_text(change, encoding="utf-8")
    capsys.readouterr()
    assert ledger.main(["--against", str(before)]) == 0
    printed = capsys.readouterr().out
    assert "[Moved]" in printed
    assert "stale in signed.md, nothing matches it: + defect | buggy | eager: flush fail (Moved)" in printed


def test_rows_that_are_there_are_kept_when_a_ledger_is_resumed(ledger, planted, tmp_path, capsys):
    path = tmp_path / "ledger.json"
    ledger.main(["--only", "defect", "--json", str(path)])
    planted["overflow"] = 4
    ledger.main(["--resume", "--json", str(path)])
    assert "1 cases, 1 kept" in capsys.readouterr().err
    assert [one["outcome"] for one in json.loads(path.read_text(encoding="utf-8"))["rows"]] == ["at", "silent"]
    ledger.main(["--resume", "--only", "control", "--json", str(path)])  # rows of what is not chosen stay
    assert len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == 2


def test_mechanisms_need_the_module_that_names_them(ledger, planted, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        ledger.main(["--without", "stalled"])
    assert "tests/mechanisms.py" in capsys.readouterr().err


def test_the_cases_of_the_repository_are_listed_under_names_of_their_own(ledger):
    cases = importlib.import_module("_ledger_cases")
    keys = [case.key for case in cases.every_case(("corpus", "training", "docs", "scripts"))]
    assert len(keys) == len(set(keys)) > 300


def leaves_a_process() -> Any:
    if os.fork() == 0:
        time.sleep(20)
    os._exit(7)


def test_a_process_that_outlives_a_case_is_not_waited_for(ledger):
    started = time.monotonic()
    (found,) = ledger.rows_of([of(ledger, leaves_a_process)], 1)
    assert found.arms[""].findings == [("crash", "exit code 7", "")]
    assert time.monotonic() - started < 15
