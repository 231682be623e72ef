"""The base's checkout: the right files, none of the user's touched, nothing left behind; and clear words otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repositories import commit, git, repository

from ampcheck.core.errors import UsageError
from ampcheck.core.git import Repository
from ampcheck.speed.base import checkout
from ampcheck.speed.base.checkout import base_of, head_of, repository_of, require_origin, worktree


@pytest.fixture
def repo(tmp_path, monkeypatch):
    made = repository(tmp_path / "model", model_py="A = 1\n", src__pack__inner_py="B = 1\n")
    commit(made, "second", model_py="A = 2\n")
    monkeypatch.chdir(made)
    return made


def state(folder: Path):
    """What must stay as it is: index, HEAD, branches, files, worktrees."""
    index = (folder / ".git" / "index").read_bytes()
    return index, git(folder, "for-each-ref"), git(folder, "worktree", "list"), git(folder, "status", "--porcelain")


def test_the_worktree_holds_the_base_and_leaves_the_users_own_as_it_is(repo):
    (repo / "model.py").write_text("A = 3\n")
    (repo / "new.py").write_text("")
    git(repo, "add", "new.py")
    os.utime(repo / "model.py", (1, 1))  # `git status` would refresh the index
    before = (repo / ".git" / "index").read_bytes()
    found = Repository.around(repo)
    assert found.head().changed == 2
    with worktree(found, found.commit("HEAD~1")) as place:
        assert (place / "model.py").read_text() == "A = 1\n"
        assert place.name == "model"
        assert not (place / "new.py").exists()
    assert (repo / ".git" / "index").read_bytes() == before
    assert not place.parent.exists()
    assert (repo / "model.py").read_text() == "A = 3\n"


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt, SystemExit], ids=lambda kind: kind.__name__)
def test_it_is_removed_whatever_happens(repo, raised):
    found, before = Repository.around(repo), state(repo)
    places = []

    def work():
        with worktree(found, found.commit("HEAD~1")) as place:
            places.append(place)
            (place / "model.py").write_text("changed")
            (place / "more").write_text("untracked")
            raise raised

    with pytest.raises(raised):
        work()
    assert not places[0].parent.exists()
    assert state(repo) == before


def test_it_is_removed_even_where_git_cannot_remove_it(repo):
    found, before = Repository.around(repo), state(repo)
    with worktree(found, found.commit("HEAD~1")) as place:
        git(repo, "worktree", "lock", str(place))
    assert not place.parent.exists()
    assert state(repo) == before


@pytest.mark.skipif(not hasattr(signal, "SIGTERM") or os.name == "nt", reason="needs signals of POSIX")
def test_it_is_removed_when_a_job_is_cancelled(repo, tmp_path):
    code = f"""
import time
from pathlib import Path
from ampcheck.speed.base.checkout import worktree
from ampcheck.core.git import Repository
found = Repository.around(Path({str(repo)!r}))
with worktree(found, found.commit("HEAD~1")) as place:
    Path({str(tmp_path)!r}, "at").write_text(str(place))
    time.sleep(60)
"""
    process, told, deadline = subprocess.Popen([sys.executable, "-c", code]), tmp_path / "at", time.monotonic() + 60
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not Path(told.read_text()).parent.exists()
    assert "model" not in git(repo, "worktree", "list").partition("\n")[2]


@pytest.mark.skipif(os.name == "nt", reason="needs signals of POSIX")
@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_second_signal_waits_until_it_is_removed(repo, monkeypatch, again):
    found, before = Repository.around(repo), state(repo)
    remove, places = checkout._remove, []

    def slowly(*given):
        os.kill(os.getpid(), again)
        remove(*given)
        places.append(given[2])

    def work():
        with worktree(found, found.commit("HEAD~1")):
            raise KeyboardInterrupt

    monkeypatch.setattr(checkout, "_remove", slowly)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt if again == signal.SIGINT else SystemExit):
        work()
    assert not places[0].parent.exists()
    assert state(repo) == before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_hooks_of_the_repository_do_not_run(repo):
    hook = repo / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {repo}/ran\n")
    hook.chmod(0o755)
    found = Repository.around(repo)
    with worktree(found, found.commit("HEAD~1")):
        pass
    assert not (repo / "ran").exists()


def test_an_unknown_base_is_one_sentence_that_names_the_knob(repo):
    with pytest.raises(UsageError, match=r"there is no 'nowhere' in it: fetch it first .*fetch-depth: 0"):
        Repository.around(repo).commit("nowhere")
    for strange in ("--help", "", "a b", "HEAD:model.py"):
        with pytest.raises(UsageError, match="fetch-depth: 0"):
            Repository.around(repo).commit(strange)


def test_a_shallow_clone_is_told_and_a_remote_branch_offered(repo, tmp_path):
    git(repo, "branch", "topic")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", str(clone))
    found = Repository.around(clone)
    with pytest.raises(UsageError, match=r"no 'HEAD~1' in it; this is a shallow clone: .*fetch-depth: 0"):
        found.commit("HEAD~1")
    git(clone, "fetch", "-q", "--depth", "1", "origin", "topic:refs/remotes/origin/topic")
    with pytest.raises(UsageError, match="but there is origin/topic; this is a shallow clone"):
        found.commit("topic")
    with worktree(found, found.commit("origin/topic")) as place:
        assert (place / "model.py").read_text() == "A = 2\n"


def test_a_base_that_the_head_lacks_commits_of_is_taken_where_both_parted(repo):
    parted = git(repo, "rev-parse", "HEAD")
    git(repo, "branch", "topic")
    commit(repo, "main goes on", model_py="A = 3\n")
    found = Repository.around(repo)
    assert found.start("main", found.commit("main")) == (found.commit("main"), "")
    assert found.start("HEAD~1", parted) == (parted, "")
    git(repo, "checkout", "-q", "topic")
    assert found.start("main", found.commit("main")) == (parted, "merge base")
    git(repo, "checkout", "-q", "--orphan", "alone")
    commit(repo, "alone", model_py="A = 4\n")
    assert found.start("main", found.commit("main")) == (found.commit("main"), "")


def test_a_shallow_clone_that_does_not_hold_the_merge_base_is_told(repo, tmp_path):
    git(repo, "checkout", "-q", "-b", "topic")
    commit(repo, "mine", model_py="A = 3\n")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", "--no-single-branch", f"file://{repo}", str(clone))
    found = Repository.around(clone)
    with pytest.raises(UsageError, match=r"parted from 'origin/main' must be known, .*shallow.*fetch-depth: 0"):
        found.start("origin/main", found.commit("origin/main"))


def test_what_differs_from_a_commit_is_committed_changed_or_new(repo):
    found = Repository.around(repo)
    assert found.changed(found.commit("HEAD")) == []
    (repo / "src" / "pack" / "inner.py").write_text("B = 2\n")
    (repo / "näh.py").write_text("")
    os.utime(repo / "model.py", (1, 1))
    assert found.changed(found.commit("HEAD~1")) == ["model.py", "näh.py", "src/pack/inner.py"]
    assert found.files(found.commit("HEAD~1")) == ["model.py", "src/pack/inner.py"]
    assert sorted(found.files()) == ["model.py", "näh.py", "src/pack/inner.py"]


def test_a_folder_without_a_repository_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is in none: fatal: not a git repository"):
        repository_of("model:make")


def test_a_hooks_own_git_dir_is_not_heeded(repo, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert Repository.around(repo).root == repo.resolve()


def test_both_sides_run_in_the_same_folder_with_their_own_packages_first(repo, monkeypatch):
    (repo / "python").mkdir()
    monkeypatch.setattr(sys, "path", [str(repo / "python"), *sys.path])
    monkeypatch.chdir(repo / "src")
    found = repository_of("pack.inner:make")
    head = head_of(found, "pack.inner:make")
    assert head.paths == (repo, repo / "src", repo / "python")
    with worktree(found, found.commit("HEAD~1")) as place:
        base = base_of(found, place, head)
        assert base.folder == place / "src"
        assert base.paths == (place, place / "src"), "the folder of the untracked package is not in the base"


def test_a_file_is_named_from_the_folder_it_runs_in(repo, tmp_path, monkeypatch):
    assert head_of(repository_of("model.py:A"), f"{repo}/model.py:A").target == "model.py:A"
    monkeypatch.chdir(repo / "src")
    assert head_of(Repository.around(repo), "../model.py:A").target == "../model.py:A"
    monkeypatch.chdir(tmp_path)
    outside = head_of(repository_of("model/model.py:A"), "model/model.py:A")
    assert (outside.target, outside.folder) == ("model.py:A", repo)
    (tmp_path / "bench.py").write_text("")
    with pytest.raises(UsageError, match="is part of the repository that is compared"):
        head_of(Repository.around(repo), "bench.py:A")


def test_a_base_without_the_folder_to_run_in_says_so(repo, monkeypatch):
    (repo / "later").mkdir()
    monkeypatch.chdir(repo / "later")
    found = Repository.around(repo)
    with (
        worktree(found, found.commit("HEAD~1")) as place,
        pytest.raises(UsageError, match="it has no folder later, in which"),
    ):
        base_of(found, place, head_of(found, "model:A"))


def test_code_from_outside_of_the_checkout_is_refused(repo, tmp_path, monkeypatch):
    found = Repository.around(repo)
    monkeypatch.syspath_prepend(repo / "src")
    import pack.inner

    with worktree(found, found.commit("HEAD~1")) as place:
        with pytest.raises(UsageError, match=r"pack.inner must be imported from the checkout that is measured, and"):
            require_origin("pack.inner:make", place, repo)
        with pytest.raises(UsageError, match=r"pack.inner must be .* working tree of the head \(src/pack/inner.py\)"):
            require_origin("model.py:make", place, repo)
    require_origin("pack.inner:make", repo, repo)
    del sys.modules["pack.inner"], sys.modules["pack"]
    assert pack
