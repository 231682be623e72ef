"""`ampcheck sweep`: every target in a process of its own, whatever it does to it; resumable; one table and one page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ampcheck.cli.main import main
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict
from ampcheck.core.settings import Target
from ampcheck.records.matrix import Cell, MatrixStats
from ampcheck.speed.gains import measure as compilation
from ampcheck.tools.sweep import child_process
from ampcheck.tools.sweep.listing import Entry, read_list
from ampcheck.tools.sweep.results import Allowance, ResultFolder, Task
from ampcheck.tools.sweep.source import CodeDigests
from ampcheck.tools.sweep.sweep import sweep as run_sweep

pytestmark = pytest.mark.usefixtures("warm_processes")

MODELS = """
import os, sys, time
import torch

X = torch.ones(2, 4)

def touch(name):
    with open("started.txt", "a") as log:
        log.write(name + "\\n")

class Overflows(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1e6

def litters():
    import tempfile
    place = tempfile.mkdtemp(prefix="litter-")
    with open("litter.txt", "w") as log:
        log.write(place)
    from torch._inductor.runtime.runtime_utils import cache_dir
    with open("cache.txt", "w") as log:
        log.write(cache_dir())
    time.sleep(600)

def sound():
    touch("sound")
    return torch.nn.Linear(4, 4), X

def overflow():
    touch("overflow")
    return Overflows(4, 4), X

def dies():
    print("last words", flush=True)
    os.kill(os.getpid(), 9)

def leaves(): os._exit(0)
def raises(): raise RuntimeError("no weights here")
def sleeps():
    touch("sleeps")
    if os.path.exists("awake"):
        return sound()
    time.sleep(600)

def devours():
    touch("devours")
    held = []
    for _ in range(2000):
        held.append(torch.ones(4 << 20))  # 16 MiB at a time
        time.sleep(0.01)

MODELS = {"healthy": sound, "overflowing": overflow}
META = {"healthy": {"family": "linear"}, "overflowing": {"family": "linear"}}
"""

QUICK = ("--no-compile", "--dtype", "float16")


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Said:
        code = main(["sweep", *arguments, *QUICK])
        return Said(code, *capsys.readouterr())

    return run


def listed(folder: Path, *names: str) -> str:
    path = folder / "targets.txt"
    path.write_text("# the models\n\n" + "".join(f"models.py:{name}  # a comment\n" for name in names))
    return str(path)


def started(folder: Path) -> list[str]:
    path = folder / "started.txt"
    return path.read_text().split() if path.is_file() else []


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    table = Run.load(path).tables[0]
    return {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_a_target_that_kills_its_process_is_a_row_with_the_reason_and_never_the_end_of_the_sweep(
    sweep: Any, folder: Path
) -> None:
    targets = listed(folder, "dies", "leaves", "raises", "overflow", "sound")
    said = sweep(targets, "--json", "all.json", "--html", "all.html", "--jobs", "2")
    assert said.code == 1  # the overflow
    rows = rows_of(folder / "all.json")
    assert list(rows) == [f"models.py:{name}" for name in ("dies", "leaves", "raises", "overflow", "sound")]
    assert "was ended by SIGKILL" in rows["models.py:dies"]["first problem"]
    assert "ended with exit code 0" in rows["models.py:leaves"]["first problem"]
    assert "raised RuntimeError: no weights here" in rows["models.py:raises"]["first problem"]
    assert rows["models.py:overflow"]["verdict"] == "fail"
    assert "overflow (float16, eager)" in rows["models.py:overflow"]["first problem"]
    assert rows["models.py:sound"]["verdict"] == "pass"
    assert rows["models.py:sound"]["ops"] > 0
    assert "sweep of 5 targets, 1 failed, 1 clean, 3 not judged" in said.out

    run = Run.load(folder / "all.json")
    unjudged = [finding.message for finding in run.of(Verdict.INCOMPLETE)]
    assert any("last words" in message for message in unjudged)  # what it printed last is evidence
    overflow = next(finding for finding in run.of(Verdict.FAIL) if finding.check == "overflow")
    assert overflow.reproduce.startswith("ampcheck audit models.py:overflow --select overflow")
    page, table = (folder / "all.html").read_text(), (folder / "ampcheck-sweep" / "sweep.md").read_text()
    for name in rows:
        assert name in page
        assert name in table


def test_a_target_that_takes_too_long_is_ended_and_the_next_sweep_tries_it_again(sweep: Any, folder: Path) -> None:
    targets = listed(folder, "sleeps")
    for limit in ("2", "1"):
        assert sweep(targets, "--time", limit, "--json", "all.json").code == 2  # nothing was judged
        assert f"had not done so after {limit} s" in rows_of(folder / "all.json")["models.py:sleeps"]["first problem"]
    (folder / "awake").touch()
    assert sweep(targets, "--json", "all.json").code == 0


@pytest.mark.parametrize("command", ["audit", "compilation"])
def test_temporary_files_of_a_target_that_is_ended_are_removed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    task = Task(command, Target("models.py:litters"))
    (result,) = run_sweep([task], ResultFolder(folder / "results"), Allowance(15.0))
    assert "had not done so after 15 s" in result.reason
    assert (folder / "litter.txt").read_text().startswith(str(tmp_path / "ampcheck-"))
    assert not list(tmp_path.glob("ampcheck-*"))
    cache = Path((folder / "cache.txt").read_text())
    assert cache.parent == tmp_path  # Inductor's own, which targets share
    assert cache.is_dir()


def edited(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(path.read_text() + "\n")


def test_a_result_is_used_again_until_the_code_of_its_target_changes(sweep: Any, folder: Path) -> None:
    targets = listed(folder, "sound")
    said = sweep(targets)
    assert "earlier sweep" not in said.out
    said = sweep(targets)
    assert said.out.count("1 result is from an earlier sweep; --fresh audits again") == 1
    assert started(folder) == ["sound"]
    edited(folder, "models.py")
    said = sweep(targets)
    assert "1 result in ampcheck-sweep was found with other settings (code that has changed)" in said.out
    assert "earlier sweep" not in said.out
    assert started(folder) == ["sound"] * 2
    assert len(list((folder / "ampcheck-sweep").glob("*.json"))) == 1  # in place of the one of the earlier code


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=s", "-c", "user.email=s@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("where", ["no repository", "repository"])
def test_the_code_of_a_target_is_its_repository_or_what_stands_beside_it(folder: Path, where: str) -> None:
    package = folder / "package"
    (package / "inner").mkdir(parents=True)
    names = ("package/__init__.py", "package/inner/__init__.py", "package/inner/model.py", "package/layers.py")
    for name in names:
        (folder / name).touch()
    (folder / "config.yaml").touch()
    if where == "repository":
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", "first")

    def digest() -> str:
        return CodeDigests().of(f"{names[2]}:subject")

    seen = [digest()]
    assert digest() == seen[0]
    for name in names:
        edited(folder, name)
        seen.append(digest())
    (folder / "new.py").touch()
    seen.append(digest())
    if where == "repository":
        edited(folder, "config.yaml")
        seen.append(digest())
        git(folder, "commit", "-q", "-a", "-m", "second")
        seen.append(digest())
    assert len(set(seen)) == len(seen)
    (folder / "report.json").touch()
    assert digest() == seen[-1]
    module = CodeDigests().of("package.inner.model:subject")
    edited(folder, names[2])
    assert CodeDigests().of("package.inner.model:subject") != module


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of a process is read from /proc")
def test_a_target_that_needs_too_much_memory_is_ended_and_the_peak_is_reported(sweep: Any, folder: Path) -> None:
    said = sweep(listed(folder, "devours", "sound"), "--memory", "0.8", "--json", "all.json")
    rows = rows_of(folder / "all.json")
    assert "more than the 0.8 GiB that it may" in rows["models.py:devours"]["first problem"]
    assert 0.8 <= rows["models.py:devours"]["GiB"] < 2
    assert 0.02 < rows["models.py:sound"]["GiB"] < 0.8  # pages that it shares with the warm process count in part
    assert said.code == 2  # one was not judged


def test_a_sweep_goes_on_where_it_ended_and_starts_over_when_an_option_changes(sweep: Any, folder: Path) -> None:
    first = sweep(listed(folder, "sound"), "--json", "first.json")
    assert started(folder) == ["sound"]
    again = sweep(listed(folder, "sound", "overflow"), "--json", "second.json")
    assert started(folder) == ["sound", "overflow"]  # each once
    assert (first.code, again.code) == (0, 1)
    assert Run.load(folder / "second.json").tables[0].rows[0] == Run.load(folder / "first.json").tables[0].rows[0]

    ignored = sweep(listed(folder, "sound", "overflow"), "--ignore", "*", "--select", "flush")
    assert "coverage cannot be ignored" in ignored.err
    assert sweep(listed(folder, "sound", "overflow"), "--fail-on", "never").code == 0  # judged from the same results
    assert started(folder) == ["sound", "overflow"]

    changed = sweep(listed(folder, "sound", "overflow"), "--steps", "3")
    assert "2 results in ampcheck-sweep were found with other settings (steps None, now 3)" in changed.out
    assert changed.out.count("audited again") == 1


def test_a_damaged_result_is_audited_again_and_fresh_audits_all(sweep: Any, folder: Path) -> None:
    targets = listed(folder, "sound")
    sweep(targets)
    (result,) = (folder / "ampcheck-sweep").glob("*.json")  # beside the tables
    text = result.read_text()
    result.write_text(text[: len(text) // 2])
    assert sweep(targets).code == 0
    assert json.loads(result.read_text())["run"]["schema"] == 2
    sweep(targets, "--fresh")
    assert started(folder) == ["sound"] * 3


def test_a_collection_a_folder_with_a_zoo_and_a_pattern_name_targets(sweep: Any, folder: Path) -> None:
    said = sweep("models.py:MODELS", "--only", "heal*", "--json", "all.json")
    assert list(rows_of(folder / "all.json")) == ["healthy"]
    assert said.code == 0

    zoo = folder / "zoo"
    zoo.mkdir()
    (zoo / "zoo.py").write_text(MODELS.replace("MODELS =", "ZOO ="))
    assert sweep("zoo", "--json", "zoo.json").code == 1
    run = Run.load(folder / "zoo.json")
    assert [row[1] for row in run.tables[0].rows] == ["linear", "linear"]
    assert run.tables[1].title == "Families"
    assert list(run.tables[1].rows) == [("linear", 2, 1, 0, 1, 0)]
    assert "ampcheck audit 'zoo/zoo.py:ZOO[overflowing]'" in run.of(Verdict.FAIL)[0].reproduce


def test_a_list_of_members_has_their_families(folder: Path) -> None:
    (folder / "broken.py").write_text("raise ImportError\n")
    (folder / "list.txt").write_text("models.py:MODELS[healthy]\nmodels.py:MODELS[absent]\nbroken.py:MODELS[a]\n")
    assert set(read_list("list.txt")) == {
        Entry("models.py:MODELS[healthy]", "linear"),
        Entry("models.py:MODELS[absent]"),
        Entry("broken.py:MODELS[a]"),
    }


def test_a_byte_order_mark_of_a_list_is_no_part_of_its_first_target(folder: Path) -> None:
    (folder / "list.txt").write_bytes(b"\xef\xbb\xbfmodels.py:sound\r\n")
    assert read_list("list.txt") == [Entry("models.py:sound")]


@pytest.mark.parametrize(
    "meta", ["{'healthy': {'layers': 1}}", "{'healthy': 'linear'}", "{'healthy': {'family': 7}}", "3", "['healthy']"]
)
def test_a_meta_that_is_no_mapping_to_families_names_none(folder: Path, meta: str) -> None:
    (folder / "models.py").write_text(f"{MODELS}META = {meta}\n")
    assert child_process.members("models.py:MODELS") == [("healthy", ""), ("overflowing", "")]


def test_a_sweep_that_judged_nothing_is_no_success(sweep: Any, folder: Path) -> None:
    assert sweep(listed(folder, "raises")).code == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "a sweep needs a file of targets, a folder with a zoo.py, or file.py:collection; found nowhere"),
        (["models.py"], "needs the name of the collection in it, models.py:NAME"),
        (["."], ". must have a zoo.py with the mapping ZOO, of names to subjects; it has no zoo.py"),
        ([""], "file.py:collection; found an empty name"),
        (["empty.txt"], "empty.txt names no target"),
        (["list.txt", "--results", ""], "--results must name a folder or a URL; found an empty name"),
        (["list.txt", "--executor", "dask://host:x"], "--executor must be local, slurm, dask://HOST:PORT"),
        (["list.txt", "--only", "x*"], "list.txt names no target that matches --only 'x*'"),
        (["list.txt", "--jobs", "0"], "--jobs"),
        (["list.txt", "--time", "-1"], "--time"),
        (["list.txt", "--memory", "nan"], "--memory"),
        (["list.txt", "--out", "list.txt"], "the results of a sweep need a folder; list.txt is a file"),
        (["list.txt", "--markdown", "no/where.md"], "there is no folder no"),
        (["models.py:nothing"], "ampcheck: models.py has no 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    sweep: Any, folder: Path, arguments: list[str], text: str
) -> None:
    (folder / "empty.txt").write_text("# nothing\n")
    (folder / "list.txt").write_text("models.py:sound\n")
    before = sorted(folder.rglob("*"))
    said = sweep(*arguments)
    assert said.code == 2
    assert text in said.err
    assert said.err.count("\n") == 1
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)] == before


def test_ctrl_c_leaves_a_readable_partial_report_no_process_and_a_sweep_that_can_go_on(folder: Path) -> None:
    targets = listed(folder, "sound", "sleeps")
    command = [sys.executable, "-m", "ampcheck", "sweep", targets, *QUICK, "--json", "all.json", "--html", "all.html"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while "sleeps" not in started(folder):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = descendants(process.pid)
    assert children
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "sweep of 1 of 2 targets, interrupted, 1 clean" in out
    assert list(rows_of(folder / "all.json")) == ["models.py:sound"]
    for report in ("all.html", "ampcheck-sweep/sweep.md"):
        assert "sweep of 1 of 2 targets, interrupted" in (folder / report).read_text()
    assert not any(map(is_alive, children))

    (folder / "awake").touch()
    assert main(["sweep", targets, *QUICK, "--json", "all.json"]) == 0
    assert [row["verdict"] for row in rows_of(folder / "all.json").values()] == ["pass", "pass"]
    assert started(folder) == ["sound", "sleeps", "sleeps", "sound"]  # the first was not audited again


def descendants(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(text) for text in done.stdout.split()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def test_a_start_that_fails_is_named_beside_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise UsageError("the cold start was ended")

    monkeypatch.setattr(compilation.Launcher, "launch", fails)
    starts, failed = compilation._starts("models.py:healthy", "cpu", Path("caches"))
    assert starts is None
    cells = tuple(Cell(mode, precision) for mode in ("eager", "default") for precision in ("float32", "bfloat16"))
    figures = compilation._figures(MatrixStats("healthy", cells), starts, failed)
    assert figures["cold s"] is None
    assert figures["reason"] == "starts: the cold start was ended"
