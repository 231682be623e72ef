"""The fixture `speed` and its marker, on top of pytest-benchmark, and what a session keeps of speed tests.

pytest-benchmark times one callable a test; a paired measurement times several in turn. So the arms are measured first,
and pytest-benchmark is then told the seconds of the first judged arm, through two things that it documents: the option
`timer` of its marker, and `benchmark.pedantic`. Its files, its table and its options work on them.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.plugin.benchmark_timer import Replay
from ampcheck.plugin.selection import Scope, is_speed_test, why_disabled

if TYPE_CHECKING:
    from ampcheck.core.run import Finding, Run
    from ampcheck.speed.baseline import Baseline
    from ampcheck.speed.baseline import EarlierHistory as Before
    from ampcheck.speed.benchmark import Benchmark as Measured
    from ampcheck.speed.benchmark import SpeedOptions as Asked
    from ampcheck.speed.clock import Clock
    from ampcheck.speed.paired import Step
    from ampcheck.speed.stats import SpeedRecord, SpeedStats

P = ParamSpec("P")
R = TypeVar("R")

SPEED_MARKER = (
    "speed(at_least=1.0, effect=0.03, budget=10.0, precision='float32', ...): defaults of the fixture speed, as "
    "ampcheck.assert_speed takes them; precision says what the arms compute in. The closest marker counts."
)


_REPLAY = pytest.StashKey[Replay]()


def _in_the_test(method: Callable[P, R]) -> Callable[P, R]:
    """Let what a test asked wrongly be shown where it asked, without frames of ampcheck."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return method(*args, **kwargs)
        except UsageError as error:
            raise error.with_traceback(None) from error.__cause__

    return called


class Speed:
    """The fixture `speed`: called, it measures and judges; `measure` gives the figures alone. Once in each test."""

    def __init__(self, item: pytest.Item, benchmark: Any, device: str) -> None:
        if _REPLAY not in item.stash:
            raise UsageError("the fixture speed is taken as an argument of a test or fixture, not by getfixturevalue")
        self._item, self._benchmark, self._device = item, benchmark, device
        self._session: SpeedSession = item.config.stash[SESSION]
        self.used = False

    @_in_the_test
    def __call__(
        self,
        arms: Mapping[str, Step],
        *,
        at_least: float | Mapping[str, float] | None = None,
        effect: float | None = None,
        budget: float | None = None,
        precision: str | None = None,
        comparisons: int | None = None,
        false_alarms: float | None = None,
        subject: str | None = None,
        device: str | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> Run:
        """Require that each arm is at least `at_least` times as fast as the first, as `ampcheck.assert_speed` does.

        What is left out is taken from the marker `speed`, then from `assert_speed`; `device` is `--ampcheck-device`.
        A marker that says `width`, which is for `measure`, is an error.
        comparisons: by default the speed tests of this session times the arms that are judged in this one.
        Where pytest-benchmark is disabled (by its option, by xdist) each arm is called once, and the verdict is SKIP.

        Raises `AssertionError` for a FAIL and never for an UNDECIDED; `UsageError` as `assert_speed` does, and where
        it was used in this test before.
        """
        __tracebackhide__ = True
        from ampcheck.core.run import verify
        from ampcheck.speed.benchmark import judge_benchmark, skip_benchmark

        given = {"at_least": at_least, "effect": effect, "budget": budget, "precision": precision, "device": device}
        given |= {"comparisons": comparisons, "false_alarms": false_alarms, "subject": subject, "seed": seed}
        with self._asking({**given, "clock": clock}, JUDGED) as (name, asked):
            if reason := self._disabled():
                run = skip_benchmark(arms, asked, name=name, reason=reason)
                self._benchmark.pedantic(lambda: None)
            else:
                found = judge_benchmark(arms, asked, name=name, tests=self._session.tests)
                run = self._keep(found, arms, asked)
        return verify(run)

    @_in_the_test
    def measure(
        self,
        arms: Mapping[str, Step],
        *,
        width: float | None = None,
        budget: float | None = None,
        precision: str | None = None,
        subject: str | None = None,
        device: str | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> SpeedStats:
        """Measure without a verdict, as `ampcheck.measure_speed` does; it is kept like any other measurement.

        A marker that says what a verdict needs (`at_least`, `comparisons`, `false_alarms`) is an error. Its `effect`
        counts where the baseline of `--benchmark-compare` is compared with.
        Where pytest-benchmark is disabled each arm is called once and the test is skipped: there are no figures.
        """
        __tracebackhide__ = True
        from ampcheck.core.run import emit
        from ampcheck.speed.benchmark import measure_benchmark, skip_benchmark

        given = {"width": width, "budget": budget, "precision": precision, "subject": subject, "seed": seed}
        with self._asking({**given, "device": device, "clock": clock}, MEASURED) as (name, asked):
            if not (reason := self._disabled()):
                found = measure_benchmark(arms, asked, name=name)
                emit(self._keep(found, arms, asked))
                return found.stats
            emit(skip_benchmark(arms, asked, name=name, reason=reason, judged=False))
            self._benchmark.pedantic(lambda: None)
        pytest.skip(f"nothing was measured: {reason}")

    @contextmanager
    def _asking(self, given: Mapping[str, Any], taken: frozenset[str]) -> Iterator[tuple[str, Asked]]:
        """The name of the test and what it asks for.

        What ends the test before pytest-benchmark was used is told to it as well: it would warn of that.
        """
        __tracebackhide__ = True
        if self.used or self._benchmark.stats is not None:
            raise UsageError(
                f"{self._item.name} measures a second time, and pytest-benchmark keeps one benchmark of each test: "
                "give all arms at once, or make two tests of it"
            )
        self.used = True
        try:
            yield self._item.nodeid, self._asked(given, taken)
        except BaseException as error:
            with suppress(Exception, type(error)):  # this one again, and no Ctrl-C meanwhile
                self._benchmark.pedantic(_raising(error))
            raise

    def _asked(self, given: Mapping[str, Any], taken: frozenset[str]) -> Asked:
        from ampcheck.speed.benchmark import SpeedOptions as Asked

        marker = self._item.get_closest_marker("speed")
        said = marker.kwargs if marker is not None else {}
        if marker is not None and marker.args:
            raise UsageError(f"the marker speed takes names with values, such as at_least=1.2, not {marker.args[0]!r}")
        if lost := [name for name in said if name in KEYWORDS - taken]:
            how = "speed(...) measures until its verdict stands" if taken is JUDGED else "speed.measure judges nothing"
            other = "speed.measure" if taken is JUDGED else "speed(...)"
            raise UsageError(
                f"{self._item.name} is marked with {lost[0]}, which would count for nothing: {how}; take it out of the "
                f"marker, or call {other}"
            )
        named = {name: value for name, value in given.items() if value is not None}
        return Asked.of({"device": self._device}, said, named)

    def _disabled(self) -> str:
        """Why pytest-benchmark measures nothing; "" where it does."""
        if not self._benchmark.disabled:
            return ""
        return why_disabled(self._item.config) or "pytest-benchmark is disabled"

    def _keep(self, found: Measured, arms: Mapping[str, Step], asked: Asked) -> Run:
        """Tell pytest-benchmark and the session; the run with what the baselines say."""
        records = [record.to_dict() for record in found.records]
        self._benchmark.extra_info["ampcheck"] = records[0] if len(records) == 1 else records
        first = found.records[0].arm
        self._item.stash[_REPLAY].tell(self._benchmark, found.stats.arm(first).seconds, arms[first])
        run = replace(found.run, findings=(*found.run.findings, *self._session.compared(found.records, asked.effect)))
        self._session.keep(found.records, run)
        return run


def _keywords(method: Callable[..., object]) -> frozenset[str]:
    parameters = inspect.signature(method).parameters.values()
    return frozenset(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)


JUDGED = _keywords(Speed.__call__)
"""What a test that judges may be marked with."""

MEASURED = _keywords(Speed.measure) | {"effect"}
"""What one that measures alone may be marked with."""

KEYWORDS = JUDGED | MEASURED


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def again() -> NoReturn:
        raise error

    return again


class SpeedSession:
    """What a session knows of its speed tests: how many they are, the baselines, the records, the history.

    history: the folder to which the records are appended, None for no history and in workers of xdist.
    """

    def __init__(self, config: pytest.Config, history: Path | None = None) -> None:
        self.config, self.history = config, history
        self.tests = 1
        self.records: list[SpeedRecord] = []
        self._saved: list[Mapping[str, Any]] = []
        self._baseline: Baseline | None = None
        self._before: Before | None = None
        self._ever: Baseline | None = None
        self._scope = Scope(config)
        self._counts: Counter[str] = Counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_compare_machine_info(self, compared_benchmark: Mapping[str, Any]) -> None:
        """Take the benchmarks of each file that pytest-benchmark compares with."""
        self._saved += compared_benchmark.get("benchmarks", [])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        """Take the names of the tests that there are, before any are deselected."""
        if self.history is not None or self.config.getoption("benchmark_compare", None):
            self._scope.collected(items)
        return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the speed tests that are to run, which share the false alarms of the suite, and read the history."""
        found = sum(is_speed_test(item) for item in session.items)
        self.tests = max(1, found)
        self._scope.selected(session.items)
        if found and self.history is not None and self.history.exists() and not why_disabled(self.config):
            from ampcheck.speed.baseline import EarlierHistory as Before

            try:
                self._before = Before.load(self.history)
                self._ever = self._before.all()
            except UsageError as error:
                raise pytest.UsageError(f"--ampcheck-history={self.history}: {error}") from error

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """A test that asks for `speed`, ends well and measured nothing has shown nothing."""
        __tracebackhide__ = True
        ended = yield
        fixture = getattr(item, "funcargs", {}).get("speed")
        if isinstance(fixture, Speed) and not fixture.used:
            raise UsageError(
                f"{item.name} asks for the fixture speed and never called it, so nothing was judged: "
                "call speed({...}) or speed.measure({...}), or leave the fixture out"
            )
        return ended

    @pytest.hookimpl(tryfirst=True)  # pytest-benchmark reads its marker when its fixture is made
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Make pytest-benchmark read the time from what will have been measured."""
        __tracebackhide__ = True
        if is_speed_test(item):
            if not item.config.pluginmanager.has_plugin("pytest-benchmark"):
                raise UsageError(
                    "the fixture speed is built on pytest-benchmark, which is off: leave out -p no:benchmark"
                )
            marker = item.get_closest_marker("benchmark")
            args, kwargs = (marker.args, marker.kwargs) if marker is not None else ((), {})
            item.stash[_REPLAY] = replay = Replay()
            item.add_marker(pytest.mark.benchmark.with_args(*args, **{**kwargs, "timer": replay}), append=False)
        elif marker := _misplaced(item):
            raise UsageError(
                f"{item.name} is marked with speed({', '.join(marker.kwargs)}) and does not take the fixture speed, "
                "so nothing would be measured: add it to the test's arguments"
            )

    def compared(self, records: Iterable[SpeedRecord], effect: float) -> list[Finding]:
        """What the baseline and the history say of the records of one test."""
        from ampcheck.speed.baseline import check_baseline, check_names

        given, baseline = list(records), self._compared_with()
        found = [] if baseline is None else check_baseline(given, baseline, effect=effect)
        return found if self._ever is None else found + check_names(given, self._ever)

    def keep(self, records: Iterable[SpeedRecord], run: Run) -> None:
        """Take what one test measured and what was found."""
        self.records += records
        self._counts.update(str(finding.verdict) for finding in run.findings)

    @pytest.hookimpl(tryfirst=True)  # before the report is written
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell what did not run, and append to the history."""
        report = self.config.pluginmanager.get_plugin("ampcheck-report")
        if report is None:
            return
        broken_off = session.shouldstop or session.shouldfail
        if not broken_off and not why_disabled(self.config) and (found := self._missing()):
            from ampcheck.core.run import Run

            report.add(Run(findings=tuple(found)))
        if self.history is not None:
            for line in self._append(session, self.history):
                report.note(line)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line where findings that fail no test would go unseen."""
        unseen = {verdict: count for verdict, count in self._counts.items() if verdict not in ("pass", "fail")}
        if unseen and not self.config.pluginmanager.has_plugin("ampcheck-report"):
            told = ", ".join(f"{count} {verdict}" for verdict, count in unseen.items())
            terminalreporter.ensure_newline()
            terminalreporter.write_line(f"ampcheck: of the speed tests' findings {told}; --ampcheck tells why")

    def _compared_with(self) -> Baseline | None:
        """What --benchmark-compare found, nothing included; None without it."""
        if self._baseline is None and self.config.getoption("benchmark_compare", None):
            from ampcheck.speed.baseline import Baseline

            self._baseline = Baseline.of_benchmarks(self._saved)
        return self._baseline

    def _missing(self) -> list[Finding]:
        baseline = self._compared_with()
        kept = [baseline] if baseline is not None else []
        kept += [self._before.last(self.records)] if self._before is not None else []
        if not kept:
            return []
        from ampcheck.speed.baseline import check_missing

        ran = {record.name for record in self.records}
        absent = {name for one in kept for name in one.known if not self._scope.asks_for(name)}
        return [finding for one in kept for finding in check_missing(ran | absent, one)]

    def _append(self, session: pytest.Session, folder: Path) -> Iterator[str]:
        """Append all records at once; lines about it. A history that cannot be written fails the session."""
        yield from self._before.notes if self._before is not None else ()
        if not self.records:
            why = why_disabled(self.config) or "no speed test measured anything"
            yield f"nothing was added to the history in {folder}: {why}"
            return
        from ampcheck.speed.history import append, commit_of

        try:
            commit = commit_of(self.config.rootpath, besides=folder)
            append(folder, self.records, commit=commit.name, dirty=commit.dirty)
        except UsageError as error:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
            yield str(error)
        else:
            number = len(self.records)
            yield f"added {number} record{'s' * (number != 1)} to the history in {folder}"


SESSION = pytest.StashKey[SpeedSession]()


def _misplaced(item: pytest.Item) -> pytest.Mark | None:
    """A marker that can be none but ours, of an item that has no `speed` to which it could speak."""
    marker = item.get_closest_marker("speed")
    if marker is None or not marker.kwargs or "speed" in getattr(item, "fixturenames", ()):
        return None
    return marker if KEYWORDS.issuperset(marker.kwargs) else None
