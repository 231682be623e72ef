"""Audits on other machines: whatever happens to a worker, each target has one result, here or at a URL."""

from __future__ import annotations

import json
import math
import os
import pickle
import stat
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from machines import dask_workers, more_workers, tasks

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.tools.sweep import executors
from ampcheck.tools.sweep.executors import Opening, opening
from ampcheck.tools.sweep.results import Allowance, Result, ResultFolder
from ampcheck.tools.sweep.sweep import Call, run_call, sweep

posix = pytest.mark.skipif(sys.platform == "win32", reason="a worker is ended by a signal")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def opened(spec: str, jobs: int | None = None, **limits: str) -> Opening:
    texts = [f"{name}={value}" for name, value in limits.items()]
    return opening(spec, jobs=jobs, seconds=60, limits=texts, folder=Path("slurm").absolute())


def swept(folder: Path, executor: Opening, *names: str, place: str = "results", **options: Any) -> dict[str, Result]:
    run = sweep(tasks(folder, *names), ResultFolder(place), Allowance(60), executor, commands="stub", **options)
    results = list(run)
    by_name = {result.target.partition(":")[2]: result for result in results}
    assert len(by_name) == len(results) == len(names)
    return by_name


def starts(folder: Path, name: str) -> int:
    return (folder / name).stat().st_size


def require_all_but_killed(results: dict[str, Result], reason: str) -> None:
    killed = results.pop("kills")
    assert {result.ended for result in results.values()} == {"judged"}
    assert killed.ended == "ended"
    assert killed.reason.startswith("its worker was lost twice: ")
    assert reason in killed.reason
    (finding,) = killed.run.findings
    assert finding.message.startswith("not judged: its worker was lost twice")


@posix
def test_the_executor_of_the_user_runs_the_audits_and_a_broken_pool_is_opened_once_more(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "from concurrent.futures import ProcessPoolExecutor\ndef one():\n    return ProcessPoolExecutor(1)\n"
    )
    results = swept(folder, opened("mine:one"), "a", "kills", "b", "c")
    require_all_but_killed(results, "BrokenProcessPool")
    assert starts(folder, "kills") == 2


@posix
def test_a_target_of_a_lost_dask_worker_is_tried_again_and_lost_again_a_row_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with dask_workers(folder, 2) as (address, workers):
        dask = opened(f"dask://{address}")
        results = swept(folder, dask, "a", "b", "kills_once", "c", "d")
        assert {result.ended for result in results.values()} == {"judged"}
        assert {name: starts(folder, name) for name in results} == {**dict.fromkeys("abcd", 1), "kills_once": 2}
        assert sum(worker.poll() is not None for worker in workers) == 1
        monkeypatch.setattr(executors, "_PATIENCE", 2.0)
        lost = swept(folder, dask, "kills")["kills"]
        assert "lost twice: the scheduler of --executor dask://" in lost.reason
        assert "has no worker: start one" in lost.reason
        assert "has no worker yet; the audits wait 2 s for one" in capfd.readouterr().err
        monkeypatch.setattr(executors, "_PATIENCE", 60.0)
        with more_workers(folder, 2) as more:
            assert "lost twice: KilledWorker: " in swept(folder, dask, "kills")["kills"].reason
            assert [worker.poll() is not None for worker in more] == [True, True]


@posix
def test_jobs_of_submitit_are_requeued_when_preempted_and_tried_again_when_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0)  # it waits for slow file systems
    names = ("a", "kills_once", "preempted_once", "kills")
    results = swept(folder, opened("slurm", 2, cluster="local"), *names)
    require_all_but_killed(results, "ended in state FINISHED without a result; see ")
    assert [starts(folder, name) for name in names] == [1, 2, 2, 2]
    log = Path(results["a"] and str(next(folder.glob("slurm/*_log.err"))))
    assert log.is_file()


@posix
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit reaps no job that it cancels
def test_an_interrupted_sweep_ends_the_jobs_that_it_has_begun(folder: Path) -> None:
    pytest.importorskip("submitit")
    executor = opened("slurm", 2, cluster="local")
    running = sweep(tasks(folder, "waits", "a"), ResultFolder("results"), Allowance(60), executor, commands="stub")
    assert next(running).target == "stub.py:a"
    (pid,) = map(int, (folder / "waiting").read_text().split())
    running.close()
    deadline = time.monotonic() + 30
    while (Path("/proc") / str(pid)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


SBATCH = """#!{python}
import os, re, subprocess, sys
text = open(sys.argv[1]).read()
with open("{log}", "a+") as log:
    log.seek(0)
    array = str(77 + log.read().count("#!/bin/bash"))
    log.write(text)
count = int(re.search(r"--array=0-(\\d+)", text)[1]) + 1
for index in range(count):
    job = {{"SLURM_JOB_ID": str(80 + index), "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": str(index)}}
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(["bash", sys.argv[1]], **quiet, env={{**os.environ, **job, "SLURM_PROCID": "0"}})
print("Submitted batch job", array)
"""
SCANCEL = """#!/bin/sh
echo "cancelled $*" >> {log}
"""
SRUN = """#!{python}
import os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[: 2 if words[0] in ("--output", "--error") else 1]
os.execvp(words[0], words)
"""


@posix
def test_the_targets_of_a_sweep_are_one_array_of_slurm_with_the_limits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    programs = folder / "bin"
    programs.mkdir()
    scripts = {"sbatch": SBATCH, "srun": SRUN, "sacct": "#!/bin/sh\necho 'JobID|State'\n", "scancel": SCANCEL}
    for name, text in scripts.items():
        (programs / name).write_text(text.format(python=sys.executable, log=folder / "submitted"))
        (programs / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    results = swept(folder, opened("slurm", 2, partition="long", mem="4GB"), "a", "b", "c")
    assert {result.ended for result in results.values()} == {"judged"}
    text = (folder / "submitted").read_text()
    assert text.count("#!/bin/bash") == 1
    for line in ("--array=0-2%2", "--partition=long", "--mem=4GB", "--time=6", "--job-name=ampcheck"):
        assert f"#SBATCH {line}\n" in text
    running = sweep(
        tasks(folder, "d", "waits1", "waits2"), ResultFolder("results"), Allowance(60), opened("slurm"), commands="stub"
    )
    assert next(running).target == "stub.py:d"
    running.close()  # as Ctrl-C does
    (folder / "go").touch()
    assert (folder / "submitted").read_text().endswith("\ncancelled 78\n")
    (programs / "sbatch").write_text("#!/bin/sh\necho 'invalid partition specified: long' >&2; exit 1\n")
    with pytest.raises(UsageError, match=r"cannot submit jobs: "):
        swept(folder, opened("slurm", partition="long"), "e")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seconds", value) for value in (-1.0, math.nan, math.inf, "3", True, None)),
        *(("memory", value) for value in (-1, 1.5, "3")),
        *(("ended", value) for value in ("well", "", None)),
        *(("target", value) for value in (3, "stub.py:b")),
        ("command", "compilation"),
        ("reason", ["why"]),
    ],
)
def test_a_result_with_a_value_that_no_audit_gives_is_none(folder: Path, field: str, value: object) -> None:
    (task,) = tasks(folder, "a")
    results = ResultFolder("results")
    results.save(task, Result("audit", "stub.py:a", Run(), seconds=1, memory=7))
    assert ResultFolder("results").load(task) is not None
    (file,) = (folder / "results").glob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    assert ResultFolder("results").load(task) is None


def test_a_worker_with_other_code_or_without_the_folder_refuses(folder: Path) -> None:
    (task,) = tasks(folder, "a")
    results = ResultFolder("results")
    call = Call(task, Allowance(60), str(folder), results.key(task), "stub")
    assert run_call(pickle.loads(pickle.dumps(call)))["ended"] == "judged"
    gone = run_call(replace(call, folder=str(folder / "elsewhere")))
    assert gone["ended"] == "refused"
    assert "elsewhere: the machines must share it" in gone["reason"]
    other = run_call(replace(call, key={**call.key, "torch": "1.0"}))
    assert "must have the code and versions that the sweep was started with: torch " in other["reason"]
    (folder / "stub.py").write_text("# edited\n")
    assert "started with: code that has changed" in run_call(call)["reason"]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("kubernetes", "--executor must be local, slurm, dask://HOST:PORT, or package.module:factory"),
        ("ray://host:1", "--executor must be local, slurm, dask"),
        ("mine:nothing", "mine has no 'nothing'"),
        ("absent_package:pool", "cannot import absent_package"),
        ("mine:text", "--executor mine:text must return a concurrent.futures.Executor; found str"),
        ("mine:fails", "--executor mine:fails raised ZeroDivisionError"),
        (
            "slurm",
            '--executor slurm needs a cluster and limits that submitit knows: RuntimeError: Could not detect "srun"',
        ),
        ("dask://127.0.0.1:1", "dask://127.0.0.1:1 needs a scheduler there, as `dask scheduler` starts one: OSError"),
        ("dask://", "--executor must be local, slurm, dask://HOST:PORT, or package.module:factory"),
        ("dask://127.0.0.1:port", "--executor must be local, slurm, dask"),
    ],
)
def test_an_executor_that_cannot_be_opened_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spec: str, text: str
) -> None:
    monkeypatch.setattr(executors, "_CONNECT", 1)
    pytest.importorskip("submitit" if spec == "slurm" else "distributed")
    (folder / "mine.py").write_text("def text(): return 'pool'\ndef fails(): return 1 / 0\n")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    begin = time.monotonic()
    with pytest.raises(UsageError) as raised:
        swept(folder, opened(spec), "a")
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("spec", "package", "extra"), [("slurm", "submitit", "slurm"), ("dask://h:1", "distributed", "dask")]
)
def test_a_missing_package_of_an_executor_is_one_sentence_with_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spec: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "ampcheck.tools.sweep.slurm", raising=False)
    with pytest.raises(UsageError, match=rf"needs .*{package}: pip install 'ampcheck\[{extra}\]'$"):
        swept(folder, opened(spec), "a")


class Lost(ProcessPoolExecutor):
    """An executor that loses each call once it has been submitted, and from the second time on cannot be opened."""

    opened = 0

    def __init__(self) -> None:
        Lost.opened += 1
        if Lost.opened > 1:
            raise OSError("no machine is left")
        super().__init__(1)

    def submit(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("cannot schedule new futures")


def test_what_no_machine_is_left_for_is_a_row_and_not_the_end_of_the_sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lost, "opened", 0)
    monkeypatch.setattr(executors, "load_attribute", lambda spec: Lost)
    results = swept(folder, opened("tests:Lost"), "a", "b")
    assert {result.ended for result in results.values()} == {"ended"}
    assert "raised OSError: no machine is left" in results["b"].reason


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("place", ["memory://bucket/sweep", "file://{folder}/far", "far"])
def test_a_sweep_resumes_from_the_sound_results_at_a_url(folder: Path, memory: Any, place: str) -> None:
    place = place.format(folder=folder)
    names = ("a", "b", "c")
    swept(folder, opened("local"), *names, place=place)
    files, root = fsspec.core.url_to_fs(place)
    paths = sorted(path for path in files.ls(root, detail=False) if path.endswith(".json"))
    assert len(paths) == 3
    assert not [path for path in files.ls(root, detail=False) if path.endswith(".part")]
    whole = files.cat_file(paths[0])
    files.pipe_file(paths[0], whole[: len(whole) // 2])  # half a file, as of a server that was ended
    swept(folder, opened("local"), *names, place=place)
    assert [starts(folder, name) for name in names] == [2, 1, 1]
    assert json.loads(files.cat_file(paths[0]))["ended"] == "judged"
    swept(folder, opened("local"), *names, place=place, fresh=True)
    assert [starts(folder, name) for name in names] == [3, 2, 2]


def test_a_url_that_cannot_be_written_or_is_not_known_is_one_sentence(
    folder: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(memory), "pipe_file", refuses)
    with pytest.raises(UsageError, match="--results memory://b cannot be written: PermissionError: Access Denied"):
        ResultFolder("memory://b").begin([], shared=False)
    for url, text in {"nope://x": "Protocol not known: nope", "s3://b/x": "s3fs"}.items():
        monkeypatch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(UsageError, match=f"--results takes a folder or a URL of fsspec.*{text}"):
            ResultFolder(url)


def test_shards_share_a_folder_if_they_are_of_one_sweep(folder: Path, memory: Any) -> None:
    planned = [(task, "family") for task in tasks(folder, "a", "b")]
    ResultFolder("memory://s").begin(planned, shared=True)
    ResultFolder("memory://s").begin(planned, shared=True)
    with pytest.raises(UsageError, match=r"other settings \(other targets\)"):
        ResultFolder("memory://s").begin(planned[:1], shared=True)
    changed = [(replace(task, target=replace(task.target, steps=3)), family) for task, family in planned]
    with pytest.raises(
        UsageError, match=r"memory://s has results of a sweep with other settings \(steps None, now 3\)"
    ):
        ResultFolder("memory://s").begin(changed, shared=True)
    ResultFolder("memory://s").begin(changed, shared=False)
    assert [target.steps for target, *_ in ResultFolder("memory://s").sweep()] == [3, 3]
    with pytest.raises(UsageError, match=r"elsewhere has no sweep: there is no sweep\.manifest in it"):
        ResultFolder("elsewhere").sweep()


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ('{"schema": 2}', "is damaged: start over with --fresh"),
        ('{"schema": 2, "tasks": null}', "is damaged"),
        ('{"schema": 2, "tasks": []}', "is damaged"),
        ('{"schema": 2, "tasks": [1]}', "is damaged"),
        ('{"schema": 2, "tasks": [{"file": "x", "family": "", "key": {"command": "audit"}}]}', "is damaged"),
        ('{"schema": 99, "tasks": []}', "has schema 99, newer than this ampcheck reads"),
        ('{"schema": 2, "tas', "is no manifest of a sweep: JSONDecodeError"),
    ],
)
def test_a_damaged_manifest_is_no_sweep_that_passes_and_is_replaced_by_a_whole_one_alone(
    folder: Path, manifest: str, said: str
) -> None:
    planned = [(task, "") for task in tasks(folder, "a")]
    (folder / "results").mkdir()
    (folder / "results" / "sweep.manifest").write_text(manifest)
    with pytest.raises(UsageError, match=said):
        ResultFolder("results").sweep()
    with pytest.raises(UsageError, match=said):
        ResultFolder("results").begin(planned, shared=True)
    assert ResultFolder("results").begin(planned, shared=False) == ""
    assert len(ResultFolder("results").sweep()) == 1


def test_why_a_manifest_cannot_be_read_is_said(folder: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(memory), "cat_file", refuses)
    with pytest.raises(UsageError, match="is no manifest of a sweep: PermissionError: Access Denied"):
        ResultFolder("memory://b").sweep()
    with pytest.raises(UsageError, match="is no manifest of a sweep: PermissionError: Access Denied"):
        ResultFolder("memory://b").begin([], shared=True)


def test_each_executor_is_one_of_concurrent_futures() -> None:
    submitit = pytest.importorskip("submitit")
    from ampcheck.tools.sweep.slurm import ArrayExecutor

    assert submitit
    assert issubclass(executors.LocalPool, Executor)
    assert issubclass(ArrayExecutor, Executor)
