"""`ampcheck speed --base` on a real git repository. Times are real, so what is asserted holds under any load.

Each launch is three processes that import PyTorch: as few of them as each claim allows.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys

import pytest
from repositories import MODEL, commit, git, repository

from ampcheck.cli import speed as speed_cli
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run, Verdict

SHORT = ("--launches", "3", "--launches-max", "3", "--budget", "2")
SHORTEST = ("--launches", "2", "--launches-max", "2", "--budget", "0.5")


@pytest.fixture
def repo(tmp_path, monkeypatch):
    made = repository(tmp_path / "model", model_py=MODEL.format(times=24))
    monkeypatch.chdir(made)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return made


def speed(*arguments):
    """The command's code and the run it wrote."""
    parser = argparse.ArgumentParser()
    speed_cli.add_command(parser.add_subparsers())
    options = parser.parse_args(["speed", "model.py:make", "--json", "../run.json", *arguments])
    return options.command(options), Run.load("../run.json")


def verdict(run):
    return next(found for found in run.findings if found.check == "regression")


@contextlib.contextmanager
def load(processes):
    """Busy processes, wherever the system puts them."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_commit_that_makes_it_8_per_cent_slower_fails(repo):
    commit(repo, "slower", model_py=MODEL.format(times=26))
    for _ in range(2):
        code, run = speed("--base", "HEAD~1", *SHORT, "--markdown", "../comment.md")
        found = verdict(run)
        assert found.verdict is not Verdict.PASS
        if found.verdict is Verdict.FAIL:
            break
    else:
        pytest.skip(f"this machine is too busy now: {found.message}")
    assert code == 1
    assert found.observed < 1 / 1.03
    assert (repo.parent / "comment.md").read_text(encoding="utf-8").split("\n")[1].startswith("### ❌ ")
    assert run.environment["base"].startswith("HEAD~1 (")


def test_a_commit_that_changes_nothing_does_not_fail_and_leaves_the_repository_as_it_was(repo):
    commit(repo, "no change", **{"README.md": "a model"})
    (repo / "notes.txt").write_text("not committed")
    before = (repo / ".git" / "index").read_bytes(), git(repo, "status", "--porcelain"), git(repo, "for-each-ref")
    code, run = speed("--base", "HEAD~1", *SHORTEST)
    assert verdict(run).verdict in (Verdict.PASS, Verdict.UNDECIDED)
    assert code == 0
    assert run.coverage.seen["launches"] == 6
    assert "working tree, with 1 uncommitted file" in run.tables[-1].note
    assert "neither side imported the 2 files that differ (README.md, notes.txt)" in verdict(run).message
    after = (repo / ".git" / "index").read_bytes(), git(repo, "status", "--porcelain"), git(repo, "for-each-ref")
    assert after == before, "not even the bytecode of the target is left"
    assert len(git(repo, "worktree", "list").splitlines()) == 1


def test_under_load_a_commit_that_changes_nothing_ends_pass_or_undecided(repo):
    commit(repo, "no change", **{"README.md": "a model"})
    with load(2):
        code, run = speed("--base", "HEAD~1", *SHORTEST)
    assert verdict(run).verdict in (Verdict.PASS, Verdict.UNDECIDED)
    assert code == 0


def test_a_target_that_only_the_base_lacks_is_told_and_one_that_the_head_lacks_is_a_usage_error(repo):
    commit(repo, "renamed", model_py=MODEL.format(times=24).replace("def make", "def other"))
    with pytest.raises(UsageError, match=r"^head, launch 1: model.py has no 'make'"):
        speed("--base", "HEAD~1", *SHORTEST)
    commit(repo, "back", model_py=MODEL.format(times=24))
    code, run = speed("--base", "HEAD~1", *SHORTEST)
    assert code == 0
    assert verdict(run).verdict is Verdict.UNDECIDED
    assert "does not run the target: base, launch 1: model.py has no 'make'" in verdict(run).message
