"""Fewer threads where other processes keep the cores busy: the choice, and what is reported of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from simulated import SimulatedClock, taking

from ampcheck.core.run import Verdict
from ampcheck.records.speed import Rule
from ampcheck.records.threads import Occupancy, Threads
from ampcheck.speed.benchmark import SpeedTestOptions, judge_benchmark
from ampcheck.speed.clock import Effort, WallClock
from ampcheck.speed.judge import speed_run
from ampcheck.speed.paired import measure_speed
from ampcheck.speed.threads import choose, fit_threads
from ampcheck.speed.verdict import check_speed


@pytest.fixture
def program() -> Iterator[None]:
    """A program with four threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Machine(SimulatedClock):
    """A machine with some free cores. A step takes its CPU seconds, divided by the threads that run at the same time;
    where there are more threads than cores, each call waits `barrier` seconds for the one that is not scheduled.
    """

    def __init__(self, free: float, barrier: float = 0.05, switches: float = 80.0) -> None:
        super().__init__(0.0)
        self.free, self.barrier, self.switches = free, barrier, switches
        self.cpu = self.wall = 0.0
        self.seen: list[int] = []

    def block(self, call, calls):
        threads = torch.get_num_threads()
        self.seen.append(threads)
        work = sum(float(call()) for _ in range(calls))
        running = min(threads, self.free)
        wall = work / running + (calls * self.barrier if threads > self.free else 0.0)
        self.cpu += running * wall if threads <= self.free else 0.5 * wall
        self.wall += wall
        return wall

    def effort(self):
        return Effort(self.cpu, round(self.switches * self.wall))


def test_on_free_cores_the_number_stays_and_no_other_is_tried(program: None) -> None:
    clock = Machine(free=4)
    assert fit_threads(taking(0.01), clock) == Threads(4, 4)
    assert set(clock.seen) == {4}


def test_a_tiny_step_on_busy_cores_runs_with_fewer_threads(program: None) -> None:
    threads = fit_threads(taking(0.001), Machine(free=1))
    assert threads is not None
    assert (threads.used, torch.get_num_threads()) == (1, 1)
    assert threads.gain > 10


def test_no_smaller_number_is_tried_than_the_free_cores(program: None) -> None:
    clock = Machine(free=2)
    threads = fit_threads(taking(0.001), clock)
    assert threads is not None
    assert threads.used == 2
    assert 1 not in clock.seen


def test_a_long_step_keeps_the_threads_with_which_it_is_faster(program: None) -> None:
    """Half of four cores is more than one: waiting at the end of a loop costs it little."""
    ways = {4: Occupancy(4, 2.0, 80, 1.0), 2: Occupancy(2, 1.0, 80, 1.9), 1: Occupancy(1, 0.5, 80, 3.8)}
    assert choose(ways.__getitem__, 4) == Threads(4, 4)


def test_a_step_that_leaves_its_threads_idle_is_not_taken_for_a_busy_machine() -> None:
    """Python between the ops, or a sleep: it waits, and is not interrupted."""

    def alone(count: int) -> Occupancy:
        assert count == 4, "no other number is tried"
        return Occupancy(4, 0.8, 1.0, 0.01)

    assert choose(alone, 4) == Threads(4, 4)


def test_a_clock_of_a_device_leaves_the_threads_alone(program: None) -> None:
    assert fit_threads(taking(0.01), SimulatedClock()) is None
    assert fit_threads(lambda: 0.0, WallClock(lambda: None)) is None
    assert torch.get_num_threads() == 4


def test_both_arms_run_with_the_chosen_number_and_the_program_has_its_own_afterwards(program: None) -> None:
    seen: dict[str, set[int]] = {"a": set(), "b": set()}

    def arm(name: str):
        def step() -> float:
            seen[name].add(torch.get_num_threads())
            return 0.001

        return step

    # The reference ran with the others before and while the number was chosen; the second arm with one alone.
    stats = measure_speed({"a": arm("a"), "b": arm("b")}, clock=Machine(free=1), budget=0.3, width=None)
    assert seen == {"a": {4, 2, 1}, "b": {1}}
    assert stats.threads is not None
    assert stats.threads.used == stats.fingerprint["threads"] == 1
    assert torch.get_num_threads() == 4


def test_the_verdict_the_page_and_the_data_report_fewer_threads(program: None) -> None:
    arms = {"old": taking(0.001), "new": taking(0.001)}
    run = judge_benchmark(arms, SpeedTestOptions(clock=Machine(free=1)), name="net").run
    assert run.findings[0].verdict is Verdict.PASS
    for text in (run.findings[0].message, run.tables[0].note):
        assert "ran with 1 of 4 threads" in text
        assert "since other processes keep the cores busy" in text
    assert run.environment["threads"] == 1
    assert run.environment["threads of the program"] == 4


def test_without_a_verdict_it_says_why_how_long_it_takes_and_which_option_to_turn() -> None:
    arms = {"old": taking(0.5), "new": taking(0.5)}
    stats = measure_speed(arms, clock=SimulatedClock(0.02), budget=5, width=None)
    stats = replace(stats, threads=Threads(2, 2, occupancy=Occupancy(2, 0.3, 85)))
    (finding,) = check_speed(stats, Rule())
    assert finding.verdict is Verdict.UNDECIDED
    assert "3 cycles are too few, 9 are needed" in finding.message
    assert "other processes keep the cores busy: the measurement got 0.3 of 2 cores" in finding.message
    assert "--budget 22" in finding.hint  # of 9 cycles of 2 s, and a fifth
    assert "OMP_NUM_THREADS=1" in finding.hint
    assert speed_run(stats, [finding]).environment["cores that the threads got"] == 0.3


def test_the_advised_budget_decides() -> None:
    noise = 0.1
    arms = {"old": taking(0.01), "new": taking(0.01)}
    decided = 0
    for seed in range(10):
        clock = SimulatedClock(noise, seed)
        (finding,) = check_speed(measure_speed(arms, clock=clock, budget=1.0, width=None), Rule())
        assert finding.verdict is Verdict.UNDECIDED
        budget = float(finding.hint.partition("--budget ")[2].partition(":")[0])
        longer = measure_speed(arms, clock=SimulatedClock(noise, seed + 100), budget=budget, width=None)
        decided += check_speed(longer, Rule())[0].verdict is not Verdict.UNDECIDED
    assert decided >= 8


SPIN = "while True: pass"
TINY = """
import torch
from ampcheck import assert_speed
from ampcheck.speed.options import SpeedOptions

layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()
net, x = torch.nn.Sequential(*layers).requires_grad_(False), torch.randn(64, 64)

run = assert_speed({"twice": lambda: net(x) + net(x), "once": lambda: net(x)}, options=SpeedOptions(budget=10.0))
print(run.findings[0].verdict, run.findings[0].message, run.findings[0].hint, run.environment, sep="\\n")
"""


def test_beside_processes_that_keep_both_cores_busy_there_is_a_verdict_in_the_same_budget(tmp_path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("two cores are required")
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in cores]
    try:
        for other, core in zip(others, cores, strict=True):
            os.sched_setaffinity(other.pid, [core])
        env = {**os.environ, "OMP_NUM_THREADS": "2"}
        done = subprocess.run(
            ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-c", TINY],
            env=env, capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
    finally:
        for other in others:
            other.kill()
            other.wait()
    verdict, message, *_ = done.stdout.splitlines()
    assert verdict == "pass", done.stdout
    assert "ran with 1 of 2 threads" in message, done.stdout
