"""The rounds: who is launched from where, when it ends, and what a side that fails leaves; with simulated workers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from repositories import commit, git, repository

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict
from ampcheck.records.speed import Rule
from ampcheck.records.threads import Occupancy, Threads
from ampcheck.speed.base import checkout, measure
from ampcheck.speed.base.judge import check_base
from ampcheck.speed.base.measure import measure_base
from ampcheck.speed.base.stats import Signals
from ampcheck.speed.options import SpeedOptions


class Simulated:
    """A worker whose seconds are drawn."""

    started: ClassVar[list[Any]]
    random: ClassVar[Any]
    slower, luck, fails = 0.0, 0.0, ""
    wants: ClassVar[dict[str, int]] = {}
    fingerprints: ClassVar[dict[str, int]] = {}
    loads: ClassVar[dict[str, str]] = {"model": "{root}/model.py"}
    dies = ("", "")
    now: ClassVar[list[float]] = [0.0]
    step = 0.0

    def __init__(self, module, *, name, cwd, env, pythonpath, python, memory):
        self.name, self.side, self.cwd, self.paths = name, name.partition(",")[0], cwd, pythonpath
        self.asked, self.closed = [], False
        self.factor = math.exp(self.random.normal(0, 1) * self.luck) * (1 + self.slower * (self.side == "head"))
        self.started.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True

    def ask(self, command, **given):
        self.asked.append((command, given))
        if (self.side, command) == self.dies and len(self.started) > 3:
            raise UsageError(f"{self.name} was ended by SIGKILL while it was to {command}")
        if command == "modules":
            return {name: path.format(root=given["root"]) for name, path in self.loads.items()}
        if command == "load":
            if self.side == self.fails:
                raise UsageError(f"{self.name}: it raised ImportError: no _C")
            known = {"torch": "2.13", "threads": self.fingerprints.get(self.side, 1)}
            return {"subject": "model", "arms": ["eager", "compiled"], "fingerprint": known}
        if command == "warm_up":
            return {"eager": self.wants.get(self.side, 4), "compiled": 8}
        if command == "block":
            self.now[0] += self.step
            return {arm: self.factor * math.exp(self.random.normal(0, 0.01)) for arm in given["order"]}
        if command == "signals":
            return Signals(graphs=1, breaks=(("model.py:3", "why"),))
        return {"load": 1.0} if command == "conditions" else []


@pytest.fixture
def workers(tmp_path, monkeypatch):
    made = repository(tmp_path / "model", model_py="")
    commit(made, "second", model_py="# more\n")
    monkeypatch.chdir(made)
    monkeypatch.setattr(measure, "MOST_CYCLES", 40)

    class Fresh(Simulated):
        started: ClassVar[list[Any]] = []
        random = np.random.default_rng(1)

    monkeypatch.setattr(checkout, "Worker", Fresh)
    return Fresh


def run(**settings):
    return measure_base("model.py:make", "HEAD~1", SpeedOptions(**{"budget": 100.0, **settings}), rule=Rule())


def test_each_round_launches_every_side_anew_and_ends_them(workers):
    stats = run(launches=3, launches_max=3)
    assert [one.side for one in workers.started] == ["base", "A/A twin", "head"] * 3
    assert all(one.closed for one in workers.started)
    assert len(stats.rounds) == 3
    assert stats.rounds[0]["compiled"].cycles == 40
    assert stats.cycles == 120


def test_base_and_twin_run_in_the_worktree_and_the_head_where_it_is(workers, tmp_path):
    run(launches=2, launches_max=2)
    base, twin, head = workers.started[:3]
    assert base.cwd == twin.cwd != head.cwd
    assert head.cwd == tmp_path / "model"
    assert base.paths[0] == base.cwd
    loaded = [one.asked[0][1]["root"] for one in (base, twin, head)]
    assert loaded == [str(base.cwd), str(base.cwd), str(head.cwd)]
    assert not base.cwd.exists()


def test_it_ends_as_soon_as_it_is_decided_and_goes_on_while_it_is_not(workers):
    workers.slower = 0.3
    early = run(launches=3, launches_max=8)
    assert (len(early.rounds), early.stopped) == (3, "decided")
    workers.slower, workers.luck = 0.0, 0.05
    late = run(launches=3, launches_max=8)
    assert (len(late.rounds), late.stopped) == (8, "launches")
    assert check_base(late)[-1].verdict is Verdict.UNDECIDED


def test_with_fewer_threads_all_sides_are_launched_again_and_compiled_for_that_number(workers, monkeypatch):
    plain = Simulated.ask

    def ask(self, command, **given):
        return Threads(1, 2, 12.0) if command == "fit" else plain(self, command, **given)

    monkeypatch.setattr(workers, "ask", ask)
    stats = run(launches=2, launches_max=2)
    loads = [(one.side, given["threads"]) for one in workers.started for name, given in one.asked if name == "load"]
    assert [threads for _, threads in loads] == [None] * 3 + [1] * 6
    assert {side for side, threads in loads if threads == 1} == {"base", "A/A twin", "head"}
    assert not any(name == "block" for one in workers.started[:3] for name, _ in one.asked)
    assert len(stats.rounds) == 2
    assert "all sides ran with 1 of 2 threads" in check_base(stats)[-1].message


@pytest.mark.parametrize("cost", [30.0, 1.0, 0.5])
def test_processes_that_come_later_take_threads_away_unless_fewer_are_clearly_slower(workers, monkeypatch, cost):
    """Cores are free in the probe of the first launch; from the third on each call of two threads costs `cost` times as
    much, and the threads are interrupted."""
    plain, used = Simulated.ask, {}

    def ask(self, command, **given):
        if command == "load":
            used[self] = given["threads"] or 2
        crowded = len(self.started) > 6 and used[self] == 2
        if command == "fit":
            return Threads(2, 2)
        if command == "occupancy":
            return Occupancy(used[self], 0.7, 200.0) if crowded else Occupancy(used[self], float(used[self]), 0.0)
        reply = plain(self, command, **given)
        return {arm: seconds * cost for arm, seconds in reply.items()} if command == "block" and crowded else reply

    monkeypatch.setattr(workers, "ask", ask)
    stats = run(launches=4, launches_max=4)
    launched = [used[worker] for worker in workers.started if worker.side == "head"]
    assert len(stats.rounds) == 4
    if cost >= 1:
        assert launched == [2, 2, 2, 1, 1, 1, 1]
        assert stats.threads.gain == pytest.approx(cost, rel=0.1)
        assert "all sides ran with 1 of 2 threads" in check_base(stats)[-1].message
    else:
        assert launched == [2, 2, 2, 1, 2]
        assert stats.threads.used == 2


@pytest.fixture
def clock(workers, monkeypatch):
    """Time that only blocks take."""
    workers.now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: workers.now[0]))
    return workers


@pytest.mark.parametrize(
    ("step", "budget", "rounds", "cycles"),
    [(10.0, 24.0, 2, 1), (2.0, 24.0, 4, 1), (0.5, 24.0, 8, 2), (0.0625, 24.0, 8, 16)],
    ids=str,
)
def test_a_budget_ends_it_and_a_long_step_still_gives_what_one_statement_needs(clock, step, budget, rounds, cycles):
    clock.step, clock.luck = step, 0.05
    stats = run(launches=2, budget=budget)
    assert (len(stats.rounds), stats.rounds[0]["eager"].cycles) == (rounds, cycles)
    assert stats.spent == pytest.approx(clock.now[0])
    assert stats.spent <= max(budget + 3 * step, 2 * 3 * step)
    assert stats.stopped == ("budget" if rounds < 8 else "launches")


def test_all_sides_put_as_many_calls_into_a_block_in_every_round(workers):
    workers.wants = {"base": 3, "A/A twin": 4, "head": 5}
    stats = run(launches=2, launches_max=2)
    told = {given["calls"]["eager"] for one in workers.started for name, given in one.asked if name == "block"}
    assert told == {5}
    assert stats.rounds[1]["eager"].calls == 5


def test_the_sides_take_turns_in_an_order_that_is_drawn_and_the_arms_too(workers):
    run(launches=2, launches_max=2)
    orders = {tuple(given["order"]) for name, given in workers.started[0].asked if name == "block"}
    assert orders == {("eager", "compiled"), ("compiled", "eager")}


def test_a_base_that_fails_is_a_result(workers):
    workers.fails = "base"
    stats = run()
    assert stats.failure == "base, launch 1: it raised ImportError: no _C"
    assert "lacks built extensions" in check_base(stats)[0].hint
    assert all(one.closed for one in workers.started)
    workers.fails = "A/A twin"
    assert run().failure.startswith("A/A twin, launch 1: it raised")


@pytest.mark.parametrize("side", ["base", "A/A twin"])
@pytest.mark.parametrize("command", ["load", "pin", "warm_up", "block"])
def test_a_base_that_fails_after_its_first_call_is_the_same_finding(workers, command, side):
    workers.dies = (side, command)
    stats = run()
    assert stats.failure == f"{side}, launch 2 was ended by SIGKILL while it was to {command}"
    assert len(stats.rounds) == 1, "what was measured before is kept"
    assert [found.verdict for found in check_base(stats)] == [Verdict.UNDECIDED]
    assert all(one.closed for one in workers.started)


def test_a_head_that_fails_after_its_first_call_is_a_usage_error(workers):
    workers.dies = ("head", "block")
    with pytest.raises(UsageError, match=r"^head, launch 2 was ended by SIGKILL while it was to block$"):
        run()


def test_modules_that_are_installed_as_a_copy_are_refused(workers, tmp_path):
    workers.loads = {"model": "/usr/lib/python3/site-packages/model.py"}
    with pytest.raises(UsageError, match=r"^head: model must be imported from the checkout .* \(\.\) on PYTHONPATH$"):
        run()
    assert [name for one in workers.started for name, _ in one.asked] == ["load", "load", "load", "modules"]


def test_a_change_that_neither_side_imported_is_told(workers, tmp_path):
    assert run(launches=2, launches_max=2).idle == ""
    workers.loads = {"other": "{root}/other.py"}
    assert run(launches=2, launches_max=2).idle == "neither side imported the file that differs (model.py)"


def test_the_same_commit_and_a_clean_tree_are_told_before_anything_is_launched(workers):
    stats = measure_base("model.py:make", "HEAD")
    assert (stats.stopped, stats.rounds, workers.started) == ("unchanged", (), [])
    assert [found.verdict for found in check_base(stats)] == [Verdict.SKIP]


def test_a_base_that_has_gone_on_is_compared_where_both_parted(workers, tmp_path):
    made = tmp_path / "model"
    git(made, "checkout", "-q", "-b", "topic")
    git(made, "checkout", "-q", "main")
    gone_on = commit(made, "faster", model_py="# faster\n")
    git(made, "checkout", "-q", "topic")
    parted = commit(made, "mine", model_py="# mine\n") and git(made, "rev-parse", "HEAD~1")
    stats = measure_base("model.py:make", "main", SpeedOptions(launches=2, launches_max=2, budget=100.0))
    assert (stats.base.name, stats.base.revision, stats.base.how) == ("main", parted[:10], "merge base")
    assert stats.notes[0] == (
        f"the head lacks commits of main ({gone_on[:10]}), so that it is compared with {parted[:10]}, their merge base"
    )
    assert run(launches=2, launches_max=2).base.how == ""


def test_what_was_asked_is_kept_with_the_target(workers):
    assert run(launches=2, launches_max=2, mode="default").settings == "model.py:make, mode default"


def test_a_head_that_fails_is_a_usage_error_that_says_so(workers):
    workers.fails = "head"
    with pytest.raises(UsageError, match=r"^head, launch 1: it raised ImportError: no _C$"):
        run()
    assert all(one.closed for one in workers.started)


def test_signals_and_what_differs_in_the_settings_are_kept(workers):
    workers.fingerprints = {"head": 2}
    stats = run(launches=2, launches_max=2)
    assert stats.signals["head"].breaks == (("model.py:3", "why"),)
    assert stats.notes == ("base and head set differently: threads: 1 and 2",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"launches": 1}, "launches must be a whole number, 2 or more; found 1"),
        ({"launches": 4, "launches_max": 3}, "launches_max must be a whole number, 4 or more; found 3"),
        ({"budget": 0}, "budget must be a finite number above 0; found 0"),
        ({"budget": math.nan}, "budget must be a finite number"),
        ({"budget": math.inf}, "budget must be a finite number"),
        ({"mode": "fast"}, "mode must be one of eager, default.*found 'fast'"),
        ({"precision": "fp16"}, "precision must be one of float32.*found 'fp16'"),
    ],
    ids=["one launch", "fewer at most", "no budget", "nan", "no end", "a mode", "a precision"],
)
def test_numbers_that_mean_nothing_are_refused_before_anything_runs(workers, settings, said):
    with pytest.raises(UsageError, match=said):
        run(**settings)
    assert not workers.started
