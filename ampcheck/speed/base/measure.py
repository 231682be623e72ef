"""Rounds of launches: each starts every side in a process of its own, and the processes take turns block by block."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.git import Side
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Verdict
from ampcheck.core.text import counted
from ampcheck.core.worker import Worker
from ampcheck.records.speed import BASE, BUDGET_SPENT, DECIDED, HEAD, LOOKS, SIDES, TWIN, UNCHANGED, Rule, differences
from ampcheck.records.threads import Threads
from ampcheck.speed.base.checkout import (
    Checkout,
    Sources,
    base_of,
    describe_idle,
    describe_strays,
    head_of,
    own_files,
    repository_of,
    worktree,
)
from ampcheck.speed.base.stats import BaseStats, Turns, decide_rounds, look_points, rounds_of
from ampcheck.speed.clock import summarised
from ampcheck.speed.options import LAUNCHES, SpeedOptions
from ampcheck.speed.threads import GAIN

BUDGET = 24.0
"""Seconds of timed blocks in all rounds together."""

MOST_LAUNCHES = 8

LEAST_LAUNCHES = 2
"""Rounds that any verdict needs: they run, with a cycle each, even where the budget is spent before."""

MOST_CYCLES = 250
"""Cycles of a round. With more of them the difference is that of launches, which only another launch reduces."""


class BaseCannotRunError(Exception):
    """The base does not run the target, and the head does: there is nothing to compare with."""


def measure_base(
    target: str,
    base: str,
    options: SpeedOptions | None = None,
    *,
    device: str = "cpu",
    rule: Rule | None = None,
    progress: Progress = silent,
) -> BaseStats:
    """Measure the working tree, the head, against a base of the same repository.

    target: `package.module:function` or `path/to/file.py:function`. base: a commit, branch or tag; where the head lacks
    commits of it, the merge base of both. options: with a mode of torch.compile the target also runs eager, so that a
    changed speedup is recognized; without mode and precision it runs unmodified. Each round starts the base, its twin
    and the head in fresh processes; only a step of which two rounds of one cycle take longer exceeds the budget. rule:
    ends the measurement when it decides.

    Raises `UsageError` outside a repository, for an unknown base, for a shallow clone that lacks the base, for a target
    that the head does not run, and for a repository whose modules the head imports from elsewhere. A target that only
    the base does not run is a result: `BaseStats.failure`.
    """
    options = options or SpeedOptions()
    options.require_used("base")
    settings = {"device": device, "mode": options.mode, "precision": options.precision}
    if options.mode is not None or options.precision is not None:
        from ampcheck.speed.steps import EAGER, StepConfig

        StepConfig(options.mode or EAGER, options.precision or "float32")  # raises for an unknown name
    chosen = [f"{name} {value}" for name, value in settings.items() if value not in (None, "cpu")]
    repository = repository_of(target)
    named = repository.commit(base)
    commit, how = repository.start(base, named)
    head = head_of(repository, target)
    sides = repository.base(base, commit, how), repository.head()
    notes = _notes(commit, named if how else "", *sides)
    stats = BaseStats(target, *sides, notes=notes, settings=", ".join([target, *chosen]))
    changed = frozenset(repository.changed(commit))
    if not changed:
        return replace(stats, stopped=UNCHANGED)
    sources = {BASE: Sources.of(repository.files(commit)), HEAD: Sources.of(repository.files())}
    with worktree(repository, commit) as root:
        try:
            checkouts = {BASE: base_of(repository, root, head), HEAD: head}
        except UsageError as error:
            return replace(stats, failure=str(error))
        settings["repository"] = str(repository.root)
        return compare(
            stats, checkouts, options, settings, sources=sources, changed=changed, rule=rule, progress=progress
        )


def compare(
    stats: BaseStats,
    checkouts: Mapping[str, Checkout],
    options: SpeedOptions,
    settings: Mapping[str, str | None],
    *,
    sources: Mapping[str, Sources] | None = None,
    changed: frozenset[str] = frozenset(),
    rule: Rule | None = None,
    progress: Progress = silent,
) -> BaseStats:
    """Measure the head against the base, as `measure_base` does; `stats` with the rounds.

    settings: of a launch: device, mode, precision and repository, the folder of the user's own checkout, or "" where
    the origin of the target is not checked. sources, changed: Python files of each side, and those that differ.
    """
    sources = sources or {side: Sources({}) for side in (BASE, HEAD)}
    least = options.launches or LAUNCHES
    most = options.launches_max or max(least, MOST_LAUNCHES)
    looks = look_points(least, most, len(LOOKS))
    budget = BUDGET if options.budget is None else options.budget
    comparison = _Comparison(stats, checkouts, settings, budget, most, Random(options.seed), sources, changed)
    try:
        while (number := len(stats.rounds)) < most:
            progress(f"launch {number + 1} of base, twin and head", number, most)
            comparison.launch(number + 1)
            stats = comparison.stats
            number = len(stats.rounds)
            if number in looks and rule is not None and _is_decided(stats, rule):
                return replace(stats, stopped=DECIDED)
            if LEAST_LAUNCHES <= number < most and stats.spent >= budget:
                return replace(stats, stopped=BUDGET_SPENT)
    except BaseCannotRunError as error:
        return replace(stats, failure=str(error))
    return stats


@dataclass(slots=True)
class _Comparison:
    """The rounds so far. sources, changed: Python files of each side, and those that differ. calls: in a block."""

    stats: BaseStats
    checkouts: Mapping[str, Checkout]
    settings: Mapping[str, str | None]
    budget: float
    most: int
    random: Random
    sources: Mapping[str, Sources]
    changed: frozenset[str]
    calls: dict[str, int] = field(default_factory=dict)
    conditions: list[dict[str, float]] = field(default_factory=list)
    needs_threads: bool = False
    """True if a round with fewer threads has been clearly slower."""

    def launch(self, number: int) -> None:
        """One round: launch every side, let them take turns, and end them. The rounds begin again with fewer threads
        where other processes kept those of this round from running, and a round with fewer is not clearly slower."""
        while not self._launch(number):
            pass  # with the number of threads that the first launch chose: compiled code is for one
        crowded, calls, threads = self.stats, self.calls, self.stats.threads
        if self.needs_threads or threads is None or threads.used == 1 or not threads.crowded:
            return
        fewer = Threads(threads.used // 2, threads.allowed)
        self.stats, self.calls = replace(crowded, threads=fewer, rounds=()), {}
        self._launch(1)
        gain = _mean_seconds(crowded.rounds[-1]) / _mean_seconds(self.stats.rounds[-1])
        if gain * GAIN >= 1 and self.stats.threads is not None:
            self.stats = replace(self.stats, threads=replace(self.stats.threads, gain=threads.gain * gain))
        else:
            self.needs_threads, self.calls = True, calls
            self.stats = replace(crowded, spent=self.stats.spent)

    def _launch(self, number: int) -> bool:
        """False: the sides were launched with more threads than suit the load of the machine, and were not timed."""
        known = self.stats
        with ExitStack() as stack:
            # On the way out the workers end first, so that no thread of the pool waits for them.
            pool = stack.enter_context(ThreadPoolExecutor(len(SIDES)))
            workers = {side: stack.enter_context(self._worker(side, number)) for side in SIDES}
            # All at once: importing and compiling take longest. A failure of the head is raised first.
            replies = {side: pool.submit(self._load, side, worker) for side, worker in workers.items()}
            loaded = {side: replies[side].result() for side in (HEAD, BASE, TWIN)}
            arms, idle = tuple(loaded[HEAD]["arms"]), known.idle if number > 1 else self._idle(workers)
            threads = known.threads
            if threads is None and (fitted := _ask(HEAD, workers[HEAD], "fit")):
                threads = fitted
                self.stats = known = replace(known, threads=threads)
                if fitted.fewer:
                    return False
            for side, worker in workers.items():
                _ask(side, worker, "pin", number=number)
            # All sides put as many calls into a block, in all rounds: they share the higher cost of a first call alike.
            calls = [_ask(side, worker, "warm_up") for side, worker in workers.items()]
            for arm in arms:
                self.calls.setdefault(arm, max(preferred[arm] for preferred in calls))
            self.conditions.append(_ask(HEAD, workers[HEAD], "conditions"))
            begin = time.perf_counter()
            turns = self._turns(workers, arms)
            spent = time.perf_counter() - begin
            self.conditions.append(_ask(HEAD, workers[HEAD], "conditions"))
            if threads is not None:
                threads = replace(threads, occupancy=_ask(HEAD, workers[HEAD], "occupancy") or None)
            signals = known.signals or {side: _ask(side, workers[side], "signals") for side in (BASE, HEAD)}
        prints = [loaded[side]["fingerprint"] for side in (BASE, HEAD)]
        differing = (f"base and head set differently: {each}" for each in differences(*prints))
        self.stats = replace(
            known,
            subject=loaded[HEAD]["subject"],
            arms=arms,
            rounds=(*known.rounds, turns),
            signals=signals,
            fingerprint=prints[1],
            conditions=summarised(self.conditions),
            notes=tuple(dict.fromkeys((*known.notes, *differing))),
            spent=known.spent + spent,
            idle=idle,
            threads=threads,
        )
        return True

    def _worker(self, side: str, number: int) -> Worker:
        checkout = self.checkouts[HEAD if side == HEAD else BASE]
        return checkout.worker("ampcheck.speed.base.child_process:Launch", f"{side}, launch {number}")

    def _load(self, side: str, worker: Worker) -> Any:
        checkout = self.checkouts[HEAD if side == HEAD else BASE]
        threads = self.stats.threads.used if self.stats.threads else None
        root = str(checkout.root)
        return _ask(side, worker, "load", target=checkout.target, root=root, threads=threads, **self.settings)

    def _idle(self, workers: Mapping[str, Worker]) -> str:
        """That no side imported a file that differs, if so.

        A package that is installed as a copy is the same on both sides: raises `UsageError`, or `BaseCannotRunError`.
        """
        used: set[str] = set()
        for side in (HEAD, BASE):
            root, sources = self.checkouts[side].root, self.sources[side]
            loaded = _ask(side, workers[side], "modules", root=str(root), names=sources.names)
            if strays := sources.strays(loaded, root, self.changed):
                message = f"{side}: {describe_strays(strays, loaded)}"
                raise UsageError(message) if side == HEAD else BaseCannotRunError(message)
            used |= own_files(loaded, root)
        return describe_idle(self.changed, used)

    def _turns(self, workers: Mapping[str, Worker], arms: tuple[str, ...]) -> Mapping[str, Turns]:
        """Cycles until this round's share of the remaining budget is spent, at least one."""
        share = (self.budget - self.stats.spent) / (self.most - len(self.stats.rounds))
        seconds: dict[str, dict[str, list[float]]] = {arm: {side: [] for side in SIDES} for arm in arms}
        begin, cycles = time.perf_counter(), 0
        while not cycles or (cycles < MOST_CYCLES and time.perf_counter() - begin < share):
            order = self.random.sample(arms, len(arms))
            for side in self.random.sample(SIDES, len(SIDES)):
                block = _ask(side, workers[side], "block", order=order, calls=self.calls)
                for arm in arms:
                    seconds[arm][side].append(block[arm])
            cycles += 1
        return {
            arm: Turns(tuple(sides[BASE]), tuple(sides[TWIN]), tuple(sides[HEAD]), self.calls[arm])
            for arm, sides in seconds.items()
        }


def _ask(side: str, worker: Worker, command: str, **arguments: Any) -> Any:
    """Raises `BaseCannotRunError` where the base or its twin fails, at any command."""
    try:
        return worker.ask(command, **arguments)
    except UsageError as error:
        if side == HEAD:
            raise
        raise BaseCannotRunError(str(error)) from error


def _mean_seconds(turns: Mapping[str, Turns]) -> float:
    """Of a call of the base, all arms together, the waits for a core included."""
    return sum(mean(each.base) for each in turns.values())


def _is_decided(stats: BaseStats, rule: Rule) -> bool:
    return decide_rounds(rounds_of(stats.turns(stats.judged)), rule).verdict is not Verdict.UNDECIDED


def _notes(commit: str, named: str, base: Side, head: Side) -> tuple[str, ...]:
    """named: the commit of the revision, where the merge base is another."""
    notes = []
    if named:
        notes.append(
            f"the head lacks commits of {base.name} ({named[:10]}), so that it is compared with {commit[:10]}, their "
            "merge base"
        )
    if head.changed:
        notes.append(f"the head is the working tree, with {counted(head.changed, 'uncommitted files')}")
    return tuple(notes)
