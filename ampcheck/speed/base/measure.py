"""Rounds of launches: each starts every side in a process of its own, and the processes take turns block by block."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Verdict
from ampcheck.speed.base.checkout import Checkout, base_of, head_of, repository_of, worktree
from ampcheck.speed.base.git import Repository
from ampcheck.speed.base.launches import decide_rounds, look_points, rounds_of
from ampcheck.speed.base.origin import Sources, own_files, told_idle, told_strays
from ampcheck.speed.base.stats import (
    BASE,
    BUDGET_SPENT,
    DECIDED,
    HEAD,
    SIDES,
    UNCHANGED,
    BaseStats,
    Side,
    Signals,
    Turns,
)
from ampcheck.speed.clock import summarised
from ampcheck.speed.fingerprint import differences
from ampcheck.speed.stats import LOOKS, TWIN
from ampcheck.speed.verdict import Rule
from ampcheck.speed.worker import Worker

BUDGET = 24.0
"""Seconds of timed blocks in all rounds together."""

LAUNCHES, MOST_LAUNCHES = 3, 8

LEAST_LAUNCHES = 2
"""Rounds that any statement needs: they run, with a cycle each, even where the budget is spent before."""

MOST_CYCLES = 250
"""Cycles of a round. With more of them what differs is the launch, and only another launch tells more."""


class BaseCannotRunError(Exception):
    """The base does not run the target, and the head does: there is nothing to compare with."""


def measure_base(
    target: str,
    base: str,
    *,
    mode: str | None = None,
    precision: str | None = None,
    device: str = "cpu",
    budget: float = BUDGET,
    launches: int = LAUNCHES,
    launches_max: int | None = None,
    rule: Rule | None = None,
    progress: Progress = silent,
    seed: int = 0,
) -> BaseStats:
    """Measure the working tree, the head, against a base of the same repository.

    target: `package.module:factory` or `path/to/file.py:factory`, as on the command line. base: a commit, branch or
    tag; where the head lacks commits of it, the commit at which both parted is taken. mode: of torch.compile; then the
    subject also runs eager, so that a changed speedup can be told apart; None runs it as it is. precision: of
    `steps.PRECISIONS`. budget: seconds of timed blocks in all rounds together; only a step so long that two launches of
    one cycle each take longer exceeds it. launches: rounds at least, but for the budget, and `launches_max` at most (8,
    or `launches` if that is more); each starts the base, its twin and the head in fresh processes. rule: it ends early
    when this rule decides.

    Raises `UsageError` for a mode or precision that there is not, outside a repository, for an unknown base, for a
    shallow clone that does not hold the base, for a target that the head does not run, and for a repository whose
    modules the head imports from elsewhere. A target that only the base does not run is a result: `BaseStats.failure`.
    """
    most = _require_numbers(budget, launches, launches_max)
    asked = _asked(target, device, mode, precision)
    repository = repository_of(target)
    named = repository.commit(base)
    commit, how = repository.start(base, named)
    head = head_of(repository, target)
    sides = repository.base(base, commit, how), repository.head()
    notes = _notes(repository, commit, named if how else "", sides)
    stats = BaseStats(target, *sides, notes=notes, asked=asked)
    changed = frozenset(repository.changed(commit))
    if not changed:
        return replace(stats, stopped=UNCHANGED)
    sources = {BASE: Sources.of(repository.files(commit)), HEAD: Sources.of(repository.files())}
    with worktree(repository, commit) as root:
        if pointers := repository.pointers(root):
            told = f"the base's checkout lacks {_number(len(pointers), 'file')} kept by Git LFS ({pointers[0]})"
            stats = replace(stats, notes=(*stats.notes, f"{told}: fetch them with git lfs fetch origin {base}"))
        try:
            plan = _Plan(
                {BASE: base_of(repository, root, head), HEAD: head},
                {"repository": str(repository.root), "device": device, "mode": mode, "precision": precision},
                budget,
                most,
                Random(seed),
                sources,
                changed,
            )
        except UsageError as error:
            return replace(stats, failure=str(error))
        looks = look_points(launches, most, len(LOOKS))
        try:
            for number in range(1, most + 1):
                progress(f"launch {number} of base, twin and head", number - 1, most)
                plan.round(number)
                stats = plan.stats(stats)
                if number in looks and rule is not None and _decided(stats, rule):
                    return replace(stats, stopped=DECIDED)
                if LEAST_LAUNCHES <= number < most and plan.spent >= budget:
                    return replace(stats, stopped=BUDGET_SPENT)
        except BaseCannotRunError as error:
            return replace(stats, failure=_told(str(error), repository))
    return stats


@dataclass(slots=True)
class _Plan:
    """What is known from one round to the next."""

    checkouts: Mapping[str, Checkout]
    settings: Mapping[str, Any]
    budget: float
    most: int
    random: Random
    sources: Mapping[str, Sources]
    changed: frozenset[str]
    subject: str = ""
    arms: tuple[str, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)
    rounds: list[Mapping[str, Turns]] = field(default_factory=list)
    loaded: dict[str, Any] = field(default_factory=dict)
    signals: dict[str, Signals] = field(default_factory=dict)
    seen: list[dict[str, float]] = field(default_factory=list)
    spent: float = 0.0
    idle: str = ""

    def round(self, number: int) -> None:
        """Launch every side, let them take turns, and end them."""
        with ExitStack() as stack:
            # On the way out the workers end first, so that no thread of the pool waits for them.
            pool = stack.enter_context(ThreadPoolExecutor(len(SIDES)))
            workers = {side: stack.enter_context(self._launched(side, number)) for side in SIDES}
            self._load(pool, workers)
            if number == 1:
                self._require_origins(workers)
            for side, worker in workers.items():
                _ask(side, worker, "settle", number=number)
            self._warm_up(workers)
            self.seen.append(_ask(HEAD, workers[HEAD], "conditions"))
            self.rounds.append(self._turns(workers))
            self.seen.append(_ask(HEAD, workers[HEAD], "conditions"))
            if not self.signals:
                self.signals = {side: _signals(_ask(side, workers[side], "signals")) for side in (BASE, HEAD)}

    def stats(self, known: BaseStats) -> BaseStats:
        """What was measured so far."""
        other = differences(self.loaded[BASE]["fingerprint"], self.loaded[HEAD]["fingerprint"])
        notes = (*known.notes, *(f"base and head set differently: {one}" for one in other))
        return replace(
            known,
            subject=self.subject,
            arms=self.arms,
            rounds=tuple(self.rounds),
            signals=dict(self.signals),
            fingerprint=self.loaded[HEAD]["fingerprint"],
            conditions=summarised(self.seen),
            notes=tuple(dict.fromkeys(notes)),
            spent=self.spent,
            idle=self.idle,
        )

    def _launched(self, side: str, number: int) -> Worker:
        checkout = self.checkouts[HEAD if side == HEAD else BASE]
        return Worker(
            "ampcheck.speed.base.child_process",
            name=f"{side}, launch {number}",
            cwd=checkout.folder,
            env={"PYTHONDONTWRITEBYTECODE": "1"},  # nothing is written into the user's checkout
            pythonpath=checkout.paths,
        )

    def _load(self, pool: ThreadPoolExecutor, workers: Mapping[str, Worker]) -> None:
        """All at once: importing and compiling take longest. What the head cannot do is told first."""
        asked = {}
        for side, worker in workers.items():
            checkout = self.checkouts[HEAD if side == HEAD else BASE]
            given = {"target": checkout.target, "root": str(checkout.root), **self.settings}
            asked[side] = pool.submit(_ask, side, worker, "load", **given)
        self.loaded = {side: asked[side].result() for side in (HEAD, BASE, TWIN)}
        self.subject, self.arms = self.loaded[HEAD]["subject"], tuple(self.loaded[HEAD]["arms"])

    def _require_origins(self, workers: Mapping[str, Worker]) -> None:
        """What is installed as a copy is the same on both sides, and the paths of a checkout do not come before it
        where they do not hold it."""
        used: set[str] = set()
        for side in (HEAD, BASE):
            root, sources = self.checkouts[side].root, self.sources[side]
            loaded = _ask(side, workers[side], "modules", root=str(root), names=sources.names)
            if strays := sources.strays(loaded, root, self.changed):
                error = UsageError(f"{side}: {told_strays(strays, loaded)}")
                raise error if side == HEAD else BaseCannotRunError(str(error))
            used |= own_files(loaded, root)
        self.idle = told_idle(self.changed, used)

    def _warm_up(self, workers: Mapping[str, Worker]) -> None:
        """One after the other. All sides put as many calls into a block, in all rounds: what a first call costs more
        would otherwise be spread over different numbers."""
        wanted = [_ask(side, worker, "warm_up") for side, worker in workers.items()]
        for arm in self.arms:
            self.calls.setdefault(arm, max(one[arm] for one in wanted))

    def _turns(self, workers: Mapping[str, Worker]) -> Mapping[str, Turns]:
        """Cycles until this round's share of what is left is spent, one at the least."""
        share = (self.budget - self.spent) / (self.most - len(self.rounds))
        taken: dict[str, dict[str, list[float]]] = {arm: {side: [] for side in SIDES} for arm in self.arms}
        begun, cycles = time.perf_counter(), 0
        while not cycles or (cycles < MOST_CYCLES and time.perf_counter() - begun < share):
            inner = self.random.sample(self.arms, len(self.arms))
            told = {
                side: _ask(side, workers[side], "block", order=inner, calls=self.calls)
                for side in self.random.sample(SIDES, len(SIDES))
            }
            for arm, sides in taken.items():
                for side, seconds in sides.items():
                    seconds.append(told[side][arm])
            cycles += 1
        self.spent += time.perf_counter() - begun
        found = {}
        for arm, sides in taken.items():
            base, twin, head = (tuple(sides[side]) for side in SIDES)
            found[arm] = Turns(base, twin, head, self.calls[arm])
        return found


def _ask(side: str, worker: Worker, command: str, **arguments: Any) -> Any:
    """Raises `BaseCannotRunError` where the base or its twin fails, at whatever it is asked."""
    try:
        return worker.ask(command, **arguments)
    except UsageError as error:
        if side == HEAD:
            raise
        raise BaseCannotRunError(str(error)) from error


def _asked(target: str, device: str, mode: str | None, precision: str | None) -> str:
    """The target with what was asked of it. Raises `UsageError` for a mode or precision that there is not."""
    if mode is not None or precision is not None:
        from ampcheck.speed.steps import EAGER, Way

        Way(mode or EAGER, precision or "float32")
    given = {"device": device if device != "cpu" else None, "mode": mode, "precision": precision}
    return ", ".join([target, *(f"{name} {value}" for name, value in given.items() if value is not None)])


def _decided(stats: BaseStats, rule: Rule) -> bool:
    found = decide_rounds(rounds_of([one[stats.judged] for one in stats.rounds]), rule)
    return found.verdict is not Verdict.UNDECIDED


def _signals(told: Mapping[str, Any]) -> Signals:
    pairs = {
        name: tuple((str(one), str(other)) for one, other in told.get(name, ())) for name in ("breaks", "recompiles")
    }
    return Signals(told["untold"], int(told.get("graphs", 0)), int(told.get("ops", 0)), **pairs)


def _notes(repository: Repository, commit: str, named: str, sides: tuple[Side, Side]) -> tuple[str, ...]:
    """named: the commit that was asked for, where it is another."""
    notes, (base, head) = [], sides
    if named:
        notes.append(
            f"the head lacks commits of {base.name} ({named[:10]}), so that it is compared with {commit[:10]}, their "
            "merge base"
        )
    if head.changed:
        notes.append(f"the head is the working tree as it stands, with {_number(head.changed, 'uncommitted file')}")
    if modules := repository.submodules(commit):
        notes.append(f"the base's checkout has empty folders for its submodules ({', '.join(modules[:3])})")
    return tuple(notes)


def _told(failure: str, repository: Repository) -> str:
    """Why the base cannot run, and what a checkout of it lacks that may be the reason."""
    built = repository.built()
    if not built:
        return failure
    lacks = f"{_number(len(built), 'built extension')} of the working tree ({', '.join(built[:3])})"
    return f"{failure}; the base's checkout holds what git tracks, and lacks {lacks}"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _require_numbers(budget: Any, launches: Any, most: Any) -> int:
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
        raise UsageError(f"budget is seconds of measurement, above 0; found {budget!r}")
    if not isinstance(launches, int) or launches < 2:
        raise UsageError(
            f"launches is 2 or more: one process says nothing of how processes of one code differ; found {launches!r}"
        )
    if most is None:
        return max(launches, MOST_LAUNCHES)
    if not isinstance(most, int) or most < launches:
        raise UsageError(f"launches_max is at least launches ({launches}); found {most!r}")
    return most
