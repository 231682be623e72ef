"""`ampcheck sweep` in shards and on other machines, as its options say; `ampcheck report` merges what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.cli.main import main
from ampcheck.core.run import Run
from ampcheck.core.settings import Target
from ampcheck.tools.sweep.listing import read_list
from ampcheck.tools.sweep.results import AUDIT, Result, ResultFolder, Task
from ampcheck.tools.sweep.shards import costs_of

pytestmark = pytest.mark.usefixtures("warm_processes")

MODELS = """
import torch

class Overflows(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1e6

X = torch.ones(2, 4)
MODELS = {"a": lambda: (torch.nn.Linear(4, 4), X), "b": lambda: (Overflows(4, 4), X), "c": lambda: 1 / 0}
META = {"a": {"family": "linear"}, "b": {"family": "linear"}}
"""

Said = tuple[int, str, str]


@pytest.fixture
def ampcheck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Said:
        quick = ("--no-compile", "--dtype", "float16") if arguments[0] == "sweep" else ()
        code = main([*arguments, *quick])
        return code, *capsys.readouterr()

    return run


def test_shards_at_a_url_are_merged_and_a_shard_that_lacks_is_said(
    ampcheck: Callable[..., Said], tmp_path: Path
) -> None:
    place = "memory://shards"
    code, out, _ = ampcheck("sweep", "models.py:MODELS", "--shard", "2/2", "--results", place)
    assert (code, "shard 2/2: sweep of 1 target, 1 not judged" in out) == (2, True)
    code, out, _ = ampcheck("report", place)
    assert code == 2
    assert "2 of 3 targets have no result yet: a, b" in " ".join(out.split())
    code, out, _ = ampcheck("sweep", "models.py:MODELS", "--shard", "1/2", "--results", place)
    assert (code, "shard 1/2: sweep of 2 targets, 1 failed, 1 clean" in out) == (1, True)
    assert ampcheck("report", place, "--json", "all.json", "--html", "all.html")[0] == 1
    run = Run.load(tmp_path / "all.json")
    assert run.title == "sweep of 3 targets, 1 failed, 1 clean, 1 not judged"
    rows = [("a", "linear", "pass"), ("c", "", "incomplete"), ("b", "linear", "fail")]
    assert [row[:3] for row in run.tables[0].rows] == rows
    assert any("audit 'models.py:MODELS[b]' --select overflow" in finding.reproduce for finding in run.findings)
    files = {path.rpartition("/")[2] for path in fsspec.filesystem("memory").ls("/shards", False)}
    assert {"sweep.manifest", "sweep-1-of-2.md", "sweep-2-of-2.md"} < files
    code, _, err = ampcheck("sweep", "models.py:MODELS", "--shard", "1/2", "--results", place, "--steps", "3")
    assert (code, "sweep with other settings (steps None, now 3): give each shard the same" in err) == (2, True)
    code, out, _ = ampcheck("sweep", "models.py:MODELS", "--results", place, "--only", "[ab]")
    assert "2 results are from an earlier sweep" in out


def test_audits_of_another_executor_are_those_of_this_machine(ampcheck: Callable[..., Said], tmp_path: Path) -> None:
    pool = ("--executor", "concurrent.futures:ProcessPoolExecutor")
    assert ampcheck("sweep", "models.py:MODELS", *pool, "--json", "there.json")[0] == 1
    assert ampcheck("sweep", "models.py:MODELS", "--fresh", "--json", "here.json")[0] == 1
    rows = [[row[:7] for row in Run.load(tmp_path / name).tables[0].rows] for name in ("there.json", "here.json")]
    assert rows[0] == rows[1]


def test_a_matrix_for_github_has_a_job_for_each_shard(ampcheck: Callable[..., Said], tmp_path: Path) -> None:
    code, out, err = ampcheck("sweep", "models.py:MODELS", "--matrix", "github", "--jobs", "2")
    assert (code, err) == (0, "")
    jobs = [{"shard": "1/2", "targets": 2}, {"shard": "2/2", "targets": 1}]
    assert json.loads(out) == {"include": jobs}
    assert out.count("\n") == 1
    assert len(json.loads(ampcheck("sweep", "models.py:MODELS", "--matrix", "github")[1])["include"]) == 3
    assert not (tmp_path / "ampcheck-sweep").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe that its reader has closed")
@pytest.mark.parametrize("changes", [False, True])
def test_a_reader_that_has_gone_hides_no_verdict_and_loses_no_file(
    ampcheck: Callable[..., Said], tmp_path: Path, changes: bool
) -> None:
    assert ampcheck("sweep", "models.py:MODELS", "--only", "b")[0] == 1
    (tmp_path / "models.py").write_text(MODELS + "# another code\n" * changes)
    reader, writer = os.pipe()
    os.close(reader)
    command = "-m ampcheck sweep models.py:MODELS --only b --no-compile --dtype float16 --json run.json".split()
    with open(writer, "wb") as gone:
        done = subprocess.run([sys.executable, *command], check=False, stdout=gone, stderr=subprocess.PIPE)
    assert (done.returncode, Run.load("run.json").failed) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shard", "0/4"], "--shard takes k/n, shard k of n from 1/n to n/n, such as 2/8; found '0/4'"),
        (["--shard", "5/4"], "found '5/4'"),
        (["--shard", "a/b"], "found 'a/b'"),
        (["--shard", "4/4"], "4 shards need as many targets; there are 3 targets"),
        (["--matrix", "github", "--jobs", "257"], "--matrix github takes at most 256 --jobs; found 257"),
        (["--costs", "x.json"], "--costs is about shards: add --shard or --matrix"),
        (["--costs", "x.json", "--shard", "1/2"], "x.json"),
        (["--executor", "kubernetes"], "--executor must be local, slurm, dask://HOST:PORT, or package.module:factory"),
        (["--executor", "dask://h:1", "--jobs", "4"], "--jobs is of --executor local and slurm"),
        (["--slurm", "partition=gpu"], "--slurm partition=gpu is of --executor slurm: add it"),
        (["--executor", "slurm", "--slurm", "gpu"], "--slurm takes LIMIT=VALUE, such as partition=gpu; found gpu"),
        (["--executor", "slurm", "--slurm", "cluster=local", "--slurm", "colour=red"], "Unknown argument 'colour'"),
        (["--results", "nope://x"], "--results takes a folder or a URL of fsspec"),
        (["--results", "n" * 300], "of results cannot be created: File name too long"),
    ],
)
def test_bad_options_of_a_sweep_are_one_sentence(
    ampcheck: Callable[..., Said], arguments: list[str], text: str
) -> None:
    if "slurm" in arguments:
        pytest.importorskip("submitit")
    code, _, err = ampcheck("sweep", "models.py:MODELS", *arguments)
    assert code == 2
    *progress, sentence = err.splitlines()  # a slow machine says what it is at
    assert text in sentence
    assert all(line.startswith("ampcheck: ") for line in progress)


def test_a_report_of_a_folder_without_a_sweep_is_one_sentence(ampcheck: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = ampcheck("report", "empty")
    assert (code, err.count("\n")) == (2, 1)
    assert "empty has no sweep: there is no sweep.manifest in it" in err


TWINS = ("models.py:MODELS[a]", "others.py:MODELS[a]")


@pytest.fixture
def twins(tmp_path: Path) -> str:
    """A list of two collections with a member of one name, of which the second overflows, and another member."""
    (tmp_path / "others.py").write_text(
        MODELS.replace('"a": lambda: (torch.nn.Linear(4, 4), X)', '"a": lambda: (Overflows(4, 4), X)')
    )
    (tmp_path / "list.txt").write_text("\n".join((*TWINS, "models.py:MODELS[b]")))
    return "list.txt"


def verdicts_of(run: Run, check: str) -> dict[str, str]:
    return {finding.name: str(finding.verdict) for finding in run.by(check)}


def test_members_of_one_name_in_two_collections_share_no_row_no_finding_and_no_cost(
    ampcheck: Callable[..., Said], twins: str, tmp_path: Path
) -> None:
    assert ampcheck("sweep", twins, "--results", "results", "--json", "all.json")[0] == 1
    run = Run.load(tmp_path / "all.json")
    assert {row[0]: row[2] for row in run.tables[0].rows} == {TWINS[0]: "pass", TWINS[1]: "fail", "b": "fail"}
    assert verdicts_of(run, "overflow") == {TWINS[1]: "fail", "b": "fail"}
    (follows,) = (finding for finding in run.by("nonfinite-gradient") if finding.name == TWINS[1])
    assert follows.cause == next(finding.key for finding in run.by("overflow") if finding.name == TWINS[1])

    assert ampcheck("report", "results", "--json", "again.json")[0] == 1
    assert Run.load(tmp_path / "again.json").tables[0].rows == run.tables[0].rows
    seconds = {row[0]: row[run.tables[0].columns.index("seconds")] for row in run.tables[0].rows}
    costs = costs_of(str(tmp_path / "all.json"), read_list(twins))
    assert costs == {**{name: seconds[name] for name in TWINS}, "models.py:MODELS[b]": seconds["b"]}
    assert ampcheck("baseline", "--from", "results")[0] == 0
    assert ampcheck("sweep", twins, "--results", "results")[0] == 0  # what is accepted has the names of the sweep


def test_members_of_one_name_that_have_no_result_are_told_apart(ampcheck: Callable[..., Said]) -> None:
    ResultFolder("results").begin([(Task(AUDIT, Target(name)), "") for name in TWINS], shared=False)
    code, out, _ = ampcheck("report", "results")
    assert code == 2
    assert f"2 of 2 targets have no result yet: {', '.join(TWINS)}" in " ".join(out.split())


def test_an_audit_of_two_members_of_one_name_has_the_findings_of_each(
    ampcheck: Callable[..., Said], twins: str, tmp_path: Path
) -> None:
    assert ampcheck("audit", *TWINS, "--no-compile", "--dtype", "float16", "--json", "both.json")[0] == 1
    run = Run.load(tmp_path / "both.json")
    assert verdicts_of(run, "overflow") == {TWINS[0]: "pass", TWINS[1]: "fail"}
    assert {model_map.subject for model_map in run.maps} == {f"{name} [float16, eager]" for name in TWINS}
    assert {table.title.rpartition(": ")[2] for table in run.tables} == {f"{name} [float16, eager]" for name in TWINS}


def plan(folder: Path, place: str, **endings: str) -> None:
    """A sweep of which each target has a result that ended in this way; "" for none."""
    planned = [Task(AUDIT, Target(f"models.py:{name}")) for name in endings]
    results = ResultFolder(place)
    results.begin([(task, "") for task in planned], shared=False)
    for task, (name, ended) in zip(planned, endings.items(), strict=True):
        finding = COVERAGE.incomplete(task.target.target, "not judged: " + ended)
        run = Run(findings=(COVERAGE.passed(name, "looked", 1) if ended == "judged" else finding,))
        if ended:
            results.save(task, Result(AUDIT, task.target.target, run, ended))


@pytest.mark.parametrize(
    ("endings", "code"),
    [
        ({"a": "judged"}, 0),
        ({"a": "judged", "b": "time"}, 2),
        ({"a": "judged", "b": ""}, 2),
        ({"a": "crashed", "b": "time", "c": ""}, 3),
    ],
)
def test_a_report_of_a_sweep_ends_as_the_sweep(
    ampcheck: Callable[..., Said], tmp_path: Path, endings: dict[str, str], code: int
) -> None:
    plan(tmp_path, "results", **endings)
    assert ampcheck("report", "results")[0] == code
    plan(tmp_path, "sound", a="judged")
    assert ampcheck("report", "results", "sound")[0] == code


def test_a_sweep_of_other_targets_into_one_folder_says_which_it_leaves_out(
    ampcheck: Callable[..., Said], tmp_path: Path
) -> None:
    lists = {"first.txt": "models.py:MODELS[a]", "second.txt": "models.py:MODELS[c]"}
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
    assert "left out" not in ampcheck("sweep", "first.txt", "--results", "one")[1]
    code, out, _ = ampcheck("sweep", "second.txt", "--results", "one")
    said = "one was of 1 other target too (models.py:MODELS[a]), which `ampcheck report` leaves out from now on"
    assert (code, said in out) == (2, True)
    assert "models.py:MODELS[a]" not in ampcheck("report", "one")[1]
    code, out, _ = ampcheck("sweep", "first.txt", "--results", "one")
    assert "1 result is from an earlier sweep" in out


def test_two_sweeps_at_once_into_one_folder_are_one_sentence_and_change_nothing(
    ampcheck: Callable[..., Said], tmp_path: Path
) -> None:
    ampcheck("sweep", "models.py:MODELS", "--only", "a")
    before = {path: path.read_bytes() for path in (tmp_path / "ampcheck-sweep").iterdir()}
    with ResultFolder("ampcheck-sweep").folder.only_sweep():
        code, out, err = ampcheck("sweep", "models.py:MODELS", "--only", "c")
    text = "another sweep writes its results to ampcheck-sweep: wait until it has ended, or name another --results"
    assert (code, text in err, out) == (2, True, "")
    assert {path: path.read_bytes() for path in (tmp_path / "ampcheck-sweep").iterdir()} == before


def test_a_sweep_that_another_has_replaced_at_a_url_says_so_and_writes_no_table(
    ampcheck: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = ResultFolder.save

    def save_as_another_begins(folder: ResultFolder, task: Task, result: Result) -> None:
        save(folder, task, result)
        ResultFolder("memory://both").begin([(Task(AUDIT, Target("other.py:f")), "")], shared=False)

    monkeypatch.setattr(ResultFolder, "save", save_as_another_begins)
    code, out, _ = ampcheck("sweep", "models.py:MODELS", "--only", "c", "--results", "memory://both")
    said = "memory://both has another sweep by now, which `ampcheck report` shows: name another --results"
    assert (code, said in out, "all tables" in out) == (2, True, False)
    files = {path.rpartition("/")[2] for path in fsspec.filesystem("memory").ls("/both", False)}
    assert "sweep.md" not in files


def test_a_folder_without_room_for_a_lock_is_one_sentence(ampcheck: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "ampcheck-sweep" / ".lock").mkdir(parents=True)
    code, out, err = ampcheck("sweep", "models.py:MODELS", "--only", "c")
    assert (code, out, "the folder ampcheck-sweep of results cannot be written: Is a directory" in err) == (2, "", True)


def test_an_executor_that_cannot_be_opened_leaves_the_sweep_before_as_it_is(
    ampcheck: Callable[..., Said], tmp_path: Path
) -> None:
    assert ampcheck("sweep", "models.py:MODELS", "--executor", "models:MODELS", "--results", "none")[0] == 2
    assert not (tmp_path / "none").exists()
