"""Which tests run by default: chosen from the processor seconds in `budget.json`, so that all together take `DEFAULT`.

Each test function may spend the same allowance on its cases; a case beyond it is marked `slow`. A file keeps its
cheapest test, and a function of `promises` and `contract` its cheapest case. A new test runs until the file knows it.
The command

    python -m pytest -m "" --write-budget [PATH ...]

measures what it runs and keeps what the file has of other tests; without a path it fits the allowance, too, and with
`--collect-only` it does that alone. Seconds are of processors, of the test and of the processes that it started: those
of the clock depend on what else the machine does.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

FILE = Path(__file__).with_name("budget.json")
ROOT = FILE.parents[1]
DEFAULT = 290.0
"""Seconds of the tests that run by default; collecting them takes 30 s in each of two workers."""

CHEAP = 0.005
"""Seconds of a case that the file does not name: what pytest itself takes."""

Seconds = dict[str, dict[str, float | None]]
"""Of each file its functions, and cases that take much longer than others; None: slow, but was not measured."""


@dataclass(frozen=True)
class Budget:
    """allowance: seconds that the cases of a function may take by default."""

    seconds: Seconds = field(default_factory=dict)
    allowance: float = float("inf")

    @classmethod
    def load(cls) -> Budget:
        data = json.loads(FILE.read_text(encoding="utf-8"))
        return cls(data["seconds"], data["allowance"])

    def cost(self, test: str) -> float | None:
        """Seconds of a case, by its node id; None if nobody knows, but that it is slow."""
        file, _, name = test.partition("::")
        known = self.seconds.get(file, {})
        return known.get(name, known.get(function_of(name), CHEAP))

    def chosen(self, tests: Iterable[str]) -> set[str]:
        """The node ids that run by default, of all those of some files."""
        files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for test in tests:
            files[test.partition("::")[0]][function_of(test)].append(test)
        return {test for file, functions in files.items() for test in self._of_file(file, functions.values())}

    def _of_file(self, file: str, functions: Iterable[Sequence[str]]) -> Iterator[str]:
        chosen, cheapest = [], []
        for cases in functions:
            costs = {test: cost for test in cases if (cost := self.cost(test)) is not None}
            taken = paid(costs, self.allowance)
            chosen += taken
            if costs and not taken:
                test = min(costs, key=costs.__getitem__)
                cheapest.append((costs[test], test))
        if file.startswith(("tests/promises/", "tests/contract/")):
            chosen += [test for _, test in cheapest]
        return iter(chosen or [test for _, test in sorted(cheapest)[:1]])

    def total(self, tests: Iterable[str]) -> float:
        return sum(self.cost(test) or 0.0 for test in tests)

    def fitted(self, tests: Sequence[str]) -> Budget:
        """With the largest allowance for which what runs by default fits; tests: node ids of the whole suite."""
        low, high = 0.0, 60.0
        for _ in range(20):
            middle = (low + high) / 2
            tried = Budget(self.seconds, middle)
            low, high = (middle, high) if tried.total(tried.chosen(tests)) <= DEFAULT else (low, middle)
        return Budget(self.seconds, int(1000 * low) / 1000)

    def measured(self, times: Mapping[str, float], tests: Iterable[str]) -> Budget:
        """With the seconds of what ran; tests: node ids of all tests of the files, of which others are forgotten."""
        cases: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for test in tests:
            file, _, name = test.partition("::")
            cases[file][function_of(name)].append(name)
        seconds = {file: rows for file, rows in self.seconds.items() if file not in cases and (ROOT / file).exists()}
        for file, functions in cases.items():
            rows: dict[str, float | None] = {}
            for function, names in functions.items():
                new = {name: times[f"{file}::{name}"] for name in names if f"{file}::{name}" in times}
                rows |= summary(function, names, new, self.seconds.get(file, {}))
            if rows:
                seconds[file] = rows
        return Budget(seconds, self.allowance)

    def save(self) -> None:
        data = {
            "command": 'python -m pytest -m "" --write-budget',
            "machine": f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}",
            "default_seconds": DEFAULT,
            "allowance": self.allowance,
            "seconds": {file: dict(sorted(rows.items())) for file, rows in sorted(self.seconds.items())},
        }
        FILE.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def function_of(test: str) -> str:
    return test.partition("[")[0]


def paid(costs: Mapping[str, float], allowance: float) -> list[str]:
    """The cases that an allowance pays for, cheap ones first; of those that cost the same an even sample."""
    chosen: list[str] = []
    for cost, count in sorted(Counter(costs.values()).items()):
        same = [test for test in costs if costs[test] == cost]
        taken = min(count, int(allowance / max(cost, 1e-9)))
        chosen += [same[number * count // taken] for number in range(taken)]
        if taken < count:
            break
        allowance -= taken * cost
    return chosen


def summary(
    function: str, names: Sequence[str], new: Mapping[str, float], old: Mapping[str, float | None]
) -> dict[str, float | None]:
    """What the file says of a function: the mean of its cases, and each of those that take three times the median."""
    rows = {name: old[name] for name in names if name in old and name not in new and name != function}
    if not new:
        return rows | ({function: old[function]} if function in old else {})
    usual = max(3 * median(new.values()), 0.3)
    rows |= {name: round(cost, 2) for name, cost in new.items() if cost > usual and name != function}
    others = mean([cost for name, cost in new.items() if name not in rows])
    if others * len(names) >= 0.05:
        rows[function] = round(others, 3 if others < 1 else 2)
    return rows


class Recorder:
    """Measures each test. What a fixture of a wider scope takes is shared among the tests that ask for it."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self._wide: Counter[tuple[str, str]] = Counter()
        self._of_wide = 0.0
        importlib.import_module("torch")  # or the first test pays for it

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        before, inside = spent(), self._of_wide
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                own = spent() - before - (self._of_wide - inside)
                self._of_wide += own
                self._wide[fixturedef.baseid, fixturedef.argname] += own

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before, inside = spent(), self._of_wide
        try:
            return (yield)
        finally:
            self.times[item.nodeid] = spent() - before - (self._of_wide - inside)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for (place, name), seconds in self._wide.items():
            asking = [i for i in session.items if name in getattr(i, "fixturenames", ()) and i.nodeid.startswith(place)]
            for item in asking:
                self.times[item.nodeid] += seconds / len(asking)
        config = session.config
        budget = Budget.load().measured(self.times, config.stash[ALL])
        whole = config.args == config.getini("testpaths")
        (budget.fitted(config.stash[ALL]) if whole else budget).save()


ALL = pytest.StashKey[list[str]]()


def spent() -> float:
    """Seconds of processors that this process and those that it waited for have used."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def choose(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark as slow what does not run by default; what is asked for by its node id does."""
    config.stash[ALL] = [item.nodeid for item in items]
    if config.option.markexpr == "not slow" and all("::" in argument for argument in config.args):
        return
    chosen = Budget.load().chosen(config.stash[ALL])
    for item in items:
        if item.nodeid not in chosen:
            item.add_marker(pytest.mark.slow)
