"""`ampcheck report`: runs of JSON files merged, compared and written in every form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ampcheck.checks.range.headroom import CHECK as HEADROOM
from ampcheck.checks.range.overflow import CHECK as OVERFLOW
from ampcheck.cli.main import main
from ampcheck.core.run import Coverage, Run, Verdict, Where

FAILED = OVERFLOW.fail("m [float16]", "too large", where=Where("forward", "ffn", "aten::exp", "m.py", 3))
WARNED = HEADROOM.warn("m [float16]", "near")
PASSED = OVERFLOW.passed("m [float16]", "finite", 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(name: str, *findings, torch: str = "2.13", title: str = "audit of m") -> str:
    Run({"torch": torch, "python": "3.11"}, findings, Coverage({"ops": 2}), title=title).save(name)
    return name


def test_runs_are_merged_with_a_table_of_them(folder, capfd):
    save("a.json", FAILED, torch="2.4")
    save("b.json", PASSED)
    assert main(["report", "a.json", "b.json", "--json", "both.json"]) == 1
    assert "a.json" in capfd.readouterr().out
    run = Run.load("both.json")
    assert run.findings == (FAILED, PASSED)
    assert run.coverage.seen == {"ops": 4}
    assert run.environment == {"torch": "2.4 | 2.13", "python": "3.11"}
    assert run.title == "2 runs of audit of m"
    assert run.tables[0].rows == (("a.json", "audit of m", "1 failed"), ("b.json", "audit of m", "1 passed"))


def test_one_run_is_written_in_every_form_as_it_is(folder, capfd):
    save("a.json", FAILED)
    files = {"--html": "a.html", "--json": "b.json", "--sarif": "a.sarif", "--markdown": "a.md"}
    assert main(["report", "a.json", *(word for pair in files.items() for word in pair)]) == 1
    assert Run.load("b.json") == Run.load("a.json")
    assert json.loads(Path("a.sarif").read_text(encoding="utf-8"))["runs"][0]["results"][0]["ruleId"] == "overflow"
    assert Path("a.md").read_text(encoding="utf-8").startswith("<!-- ampcheck report ")
    assert "audit of m" in Path("a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("fail_on", "code"), [("fail", 0), ("warn", 1), ("never", 0)])
def test_what_is_new_decides_on_the_exit_code_as_fail_on_says(folder, capfd, fail_on, code):
    save("old.json", FAILED)
    save("new.json", FAILED, WARNED)
    assert main(["report", "--compare", "old.json", "new.json", "--fail-on", fail_on, "--markdown", "c.md"]) == code
    assert "1 new, 0 worse, 0 gone, 0 no longer judged, 1 unchanged" in capfd.readouterr().out
    shown = Path("c.md").read_text(encoding="utf-8").partition("<details>")[0]
    assert shown.startswith("<!-- ampcheck compare ")
    assert "| new | headroom |" in shown


def test_a_worse_finding_fails_by_the_factor(folder, capfd):
    save("old.json", replace(FAILED, observed=4.0, limit=2.0))
    save("new.json", replace(FAILED, observed=7.0, limit=2.0))
    assert main(["report", "--compare", "old.json", "new.json"]) == 1
    assert main(["report", "--compare", "old.json", "new.json", "--factor", "2"]) == 0


def test_fail_on_of_the_repository_holds(folder, capfd):
    (folder / "pyproject.toml").write_text('[tool.ampcheck]\nfail-on = "warn"\n', encoding="utf-8")
    save("a.json", WARNED)
    assert main(["report", "a.json"]) == 1


def test_the_printed_schema_is_the_published_one(capfd):
    import ampcheck.core.run as records

    assert main(["report", "--schema"]) == 0
    assert capfd.readouterr().out == Path(records.__file__).with_name("run.schema.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the files of runs"),
        (["--schema", "a.json"], "--schema prints the schema of runs alone"),
        (["a.json", "--factor", "2"], "--factor has an effect with --compare alone"),
        (["--compare", "a.json"], "--compare takes two runs, the earlier first; found 1"),
        (["--compare", "a.json", "a.json", "--factor", "0.5"], "must be at least 1; found 0.5"),
        (["a.json", "nowhere.json"], "no run of ampcheck could be read from nowhere.json"),
        (["a.json", "other.json"], "other.json: this is no run of ampcheck"),
        (["a.json", "--html", "nowhere/a.html"], "there is no folder nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(folder, capfd, arguments, said):
    save("a.json", PASSED)
    Path("other.json").write_text("{}", encoding="utf-8")
    assert main(["report", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
    assert {path.name for path in folder.iterdir()} == {"a.json", "other.json"}


def test_what_changed_is_printed_before_the_audit(folder, capfd):
    save("old.json", FAILED)
    save("new.json", FAILED, WARNED)
    main(["report", "--compare", "old.json", "new.json"])
    printed = capfd.readouterr().out
    assert printed.startswith("1 new, 0 worse, 0 gone")
    assert printed.index("1 new, ") < printed.index("WARN headroom")


def test_a_finding_that_a_comment_accepts_is_not_gone(folder, capfd):
    """The comment changes the text of the line by which findings are matched."""
    passed = replace(PASSED, subject=FAILED.subject)
    save("old.json", replace(FAILED, code="y = x.exp()"), passed)
    masked = replace(FAILED, code="y = x.exp()  # ampcheck: ignore[overflow] known", verdict=Verdict.ACCEPTED)
    save("new.json", replace(masked, accepted="by a comment at m.py:3: known"), passed)
    assert main(["report", "--compare", "old.json", "new.json"]) == 0
    assert "0 new, 0 worse, 0 gone, 0 no longer judged, 1 unchanged" in capfd.readouterr().out


def test_an_ignored_check_is_no_longer_judged_and_not_gone(folder, capfd):
    save("old.json", FAILED, WARNED)
    save("new.json", WARNED)
    assert main(["report", "--compare", "old.json", "new.json"]) == 0
    assert "0 gone, 1 no longer judged" in capfd.readouterr().out
