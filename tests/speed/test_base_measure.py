"""The rounds: who is launched from where, when it ends, and what a side that fails leaves; with simulated workers."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
from repositories import commit, repository

from ampcheck.errors import UsageError
from ampcheck.record import Verdict
from ampcheck.speed.base import measure
from ampcheck.speed.base.check import check_base
from ampcheck.speed.base.measure import measure_base
from ampcheck.speed.verdict import Rule


class Simulated:
    """A worker whose seconds are drawn."""

    started: ClassVar[list[Any]]
    random: ClassVar[Any]
    slower, luck, fails = 0.0, 0.0, ""
    wants: ClassVar[dict[str, int]] = {}
    fingerprints: ClassVar[dict[str, int]] = {}

    def __init__(self, room, *, name, cwd, env, pythonpath):
        self.side, self.cwd, self.paths = name.partition(",")[0], cwd, pythonpath
        self.asked, self.closed = [], False
        self.factor = math.exp(self.random.normal(0, 1) * self.luck) * (1 + self.slower * (self.side == "head"))
        self.started.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True

    def ask(self, command, **given):
        self.asked.append((command, given))
        if command == "load":
            if self.side == self.fails:
                raise UsageError("it raised ImportError: no _C")
            known = {"torch": "2.13", "threads": self.fingerprints.get(self.side, 1)}
            return {"subject": "model", "arms": ["eager", "compiled"], "fingerprint": known}
        if command == "warm_up":
            return {"eager": self.wants.get(self.side, 4), "compiled": 8}
        if command == "block":
            return {arm: self.factor * math.exp(self.random.normal(0, 0.01)) for arm in given["order"]}
        if command == "signals":
            return {"untold": "", "graphs": 1, "ops": 3, "breaks": [["model.py:3", "why"]], "recompiles": []}
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

    monkeypatch.setattr(measure, "Worker", Fresh)
    return Fresh


def run(**settings):
    return measure_base("model.py:make", "HEAD~1", **{"rule": Rule(), "budget": 100.0, **settings})


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
    assert (len(early.rounds), early.stopped, early.looks) == (3, "decided", 1)
    workers.slower, workers.luck = 0.0, 0.05
    late = run(launches=3, launches_max=8)
    assert (len(late.rounds), late.stopped, late.looks) == (8, "launches", 4)
    assert check_base(late)[-1].verdict is Verdict.UNDECIDED


def test_a_budget_is_kept_and_a_step_that_is_longer_than_it_still_gives_a_few_cycles(workers):
    stats = run(launches=2, launches_max=2, budget=1e-6)
    assert stats.rounds[0]["eager"].cycles == measure.LEAST_CYCLES


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


def test_a_base_that_fails_is_a_result_with_what_its_checkout_lacks(workers, tmp_path):
    (tmp_path / "model" / "_C.so").write_text("")
    workers.fails = "base"
    stats = run()
    assert stats.failure == (
        "it raised ImportError: no _C; the base's checkout holds what git tracks, and lacks 1 built extension of the "
        "working tree (_C.so)"
    )
    assert all(one.closed for one in workers.started)
    workers.fails = "A/A twin"
    assert run().failure


def test_a_head_that_fails_is_a_usage_error_that_says_so(workers):
    workers.fails = "head"
    with pytest.raises(UsageError, match=r"^head: it raised ImportError: no _C$"):
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
        ({"launches": 1}, "launches is 2 or more"),
        ({"launches": 4, "launches_max": 3}, r"launches_max is at least launches \(4\)"),
        ({"budget": 0}, "budget is seconds of measurement, above 0; found 0"),
        ({"budget": math.nan}, "budget is seconds"),
    ],
    ids=["one launch", "fewer at most", "no budget", "nan"],
)
def test_numbers_that_mean_nothing_are_refused_before_anything_runs(workers, settings, said):
    with pytest.raises(UsageError, match=said):
        run(**settings)
    assert not workers.started
