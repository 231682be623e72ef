"""The fixture `speed`, on top of pytest-benchmark, and the speed tests of a session.

pytest-benchmark times one callable of a test; a paired measurement times several in turn. So the arms are measured
first, and pytest-benchmark then records the seconds of the first judged arm, through two documented interfaces: the
option `timer` of its marker, and `benchmark.pedantic`. Its files, its table and its options thus apply to them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Run, emit
from ampcheck.plugin.marker import MarkerArguments
from ampcheck.plugin.selection import is_speed_test, should_have_run, why_disabled

if TYPE_CHECKING:
    from ampcheck.records.speed import Baseline, SpeedRecord, SpeedStats
    from ampcheck.speed.baseline import EarlierHistory
    from ampcheck.speed.benchmark import Benchmark, SpeedTestOptions
    from ampcheck.speed.paired import Step


class RecordedTimer:
    """A timer for pytest-benchmark, which reads it at both ends of each round."""

    __name__ = "ampcheck"

    def __init__(self) -> None:
        self._readings: list[float] = []

    def __call__(self) -> float:
        """The next reading. Raises `UsageError` after the last one."""
        if not self._readings:
            _incompatible("reads its timer more than twice a round")
        return self._readings.pop()

    def replay(self, benchmark: Any, seconds: Iterable[float], step: Callable[[], object]) -> None:
        """Make the fixture `benchmark` record these durations of its rounds.

        step: runs only in a profile of --benchmark-cprofile, which is outside the rounds.
        """
        durations = list(seconds)
        self._readings = [reading for duration in reversed(durations) for reading in (duration, 0.0)]
        benchmark.pedantic(lambda: None if self._readings else step(), rounds=len(durations))
        if self._readings:
            _incompatible("reads its timer less than twice a round")


def _incompatible(reason: str) -> NoReturn:
    raise UsageError(f"pytest-benchmark {version('pytest-benchmark')} {reason}: use a version that ampcheck supports")


P = ParamSpec("P")
R = TypeVar("R")

_TIMER = pytest.StashKey[RecordedTimer]()

OF_MEASURING, OF_VERDICT = frozenset({"width"}), frozenset({"at_least", "comparisons", "false_alarms"})
"""Keywords, and settings of the marker's `speed`, that only `speed.measure` or only `speed(...)` takes."""


def _without_frames(method: Callable[P, R]) -> Callable[P, R]:
    """Raise usage errors at the caller, without frames of ampcheck."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return method(*args, **kwargs)
        except UsageError as error:
            raise error.with_traceback(None) from error.__cause__

    return called


class Speed:
    """The fixture `speed`: `speed(...)` measures and judges, `speed.measure(...)` only measures. Once in each test."""

    def __init__(self, item: pytest.Item, benchmark: Any, device: str) -> None:
        if _TIMER not in item.stash:
            raise UsageError("the fixture speed is taken as an argument of a test or fixture, not by getfixturevalue")
        self._item, self._benchmark, self._device = item, benchmark, device
        self._session: SpeedSession = item.config.stash[SESSION]
        self.used = False

    @_without_frames
    def __call__(self, arms: Mapping[str, Step], **keywords: Any) -> Run:
        """Require that each arm is at least `at_least` times as fast as the first, as `ampcheck.assert_speed` does.

        Defaults are those of the marker's `speed`, then those of `assert_speed`; `device` is `--ampcheck-device`.
        comparisons: by default the speed tests of this session times the judged arms of this test.
        If pytest-benchmark is disabled (by its option, by xdist) each arm is called once, and the verdict is SKIP.

        Raises `AssertionError` for a FAIL and never for an UNDECIDED; `UsageError` as `assert_speed` does, for `width`
        in the marker, which is for `measure`, and for a second use in a test.
        """
        __tracebackhide__ = True
        from ampcheck.outcome.raising import verify
        from ampcheck.speed.benchmark import judge_benchmark, skip_benchmark

        with self._options(keywords, OF_MEASURING) as (name, options):
            if reason := self._disabled():
                run = skip_benchmark(arms, options, name=name, reason=reason)
                self._benchmark.pedantic(lambda: None)
            else:
                run = self._record(judge_benchmark(arms, options, name=name, tests=self._session.tests), arms, options)
        return verify(run)

    @_without_frames
    def measure(self, arms: Mapping[str, Step], **keywords: Any) -> SpeedStats:
        """Measure without a verdict, as `ampcheck.measure_speed` does; the result is stored like any other.

        `at_least`, `comparisons` and `false_alarms` in the marker's `speed` are errors; `effect` applies to the
        comparison with the baseline of `--benchmark-compare`.
        If pytest-benchmark is disabled each arm is called once and the test is skipped: there are no figures.
        """
        __tracebackhide__ = True
        from ampcheck.speed.benchmark import measure_benchmark, skip_benchmark

        with self._options(keywords, OF_VERDICT) as (name, options):
            if not (reason := self._disabled()):
                measured = measure_benchmark(arms, options, name=name)
                emit(self._record(measured, arms, options))
                return measured.stats
            emit(skip_benchmark(arms, options, name=name, reason=reason, judged=False))
            self._benchmark.pedantic(lambda: None)
        pytest.skip(f"nothing was measured: {reason}")

    @contextmanager
    def _options(
        self, keywords: Mapping[str, object], excluded: frozenset[str]
    ) -> Iterator[tuple[str, SpeedTestOptions]]:
        """The name of the test and its options. excluded: those that have no effect.

        An exception before pytest-benchmark was used is raised through it as well, or it would warn that it was unused.
        """
        __tracebackhide__ = True
        if self.used or self._benchmark.stats is not None:
            raise UsageError(
                f"{self._item.name} measures a second time, and pytest-benchmark stores one benchmark of each test: "
                "measure all arms at once, or split the test"
            )
        self.used = True
        try:
            yield self._item.nodeid, self._merged(keywords, excluded)
        except BaseException as error:
            raised = error

            def raise_again() -> NoReturn:
                raise raised

            with suppress(Exception, type(error)):  # the same error again, but no Ctrl-C meanwhile
                self._benchmark.pedantic(raise_again)
            raise

    def _merged(self, keywords: Mapping[str, object], excluded: frozenset[str]) -> SpeedTestOptions:
        from ampcheck.speed.benchmark import SpeedTestOptions

        marked = MarkerArguments.of(self._item).speed
        if unused := [name for name in (*marked, *keywords) if name in excluded]:
            reason, other = "speed.measure does not judge", "speed(...)"
            if excluded is OF_MEASURING:
                reason, other = "speed(...) measures until it can judge", "speed.measure"
            raise UsageError(
                f"{self._item.name} sets {unused[0]}, which has no effect: {reason}; remove it, or call {other}"
            )
        arguments = {name: value for name, value in keywords.items() if value is not None}
        return SpeedTestOptions.of({"device": self._device}, marked, arguments)

    def _disabled(self) -> str:
        """The reason why pytest-benchmark measures nothing; "" if it measures."""
        if not self._benchmark.disabled:
            return ""
        return why_disabled(self._item.config) or "pytest-benchmark is disabled"

    def _record(self, measured: Benchmark, arms: Mapping[str, Step], options: SpeedTestOptions) -> Run:
        """Pass the result to pytest-benchmark and the session; return the run with the findings about baselines."""
        records = [record.to_dict() for record in measured.records]
        self._benchmark.extra_info["ampcheck"] = records[0] if len(records) == 1 else records
        first = measured.records[0].arm
        self._item.stash[_TIMER].replay(self._benchmark, measured.stats.arm(first).seconds, arms[first])
        compared = self._session.compare(measured.records, options.effect)
        run = replace(measured.run, findings=(*measured.run.findings, *compared))
        self._session.add(measured.records, run)
        return run


class SpeedSession:
    """The speed tests of a session: their number, baselines, records and history.

    history: the folder to which the records are appended; None for no history and in workers of xdist.
    """

    def __init__(self, config: pytest.Config, history: Path | None = None) -> None:
        self.config, self.history = config, history
        self.tests = 1
        self.records: list[SpeedRecord] = []
        self._saved: list[Mapping[str, object]] = []
        self._baseline: Baseline | None = None
        self._earlier: EarlierHistory | None = None
        self._all_earlier: Baseline | None = None
        self._collected: frozenset[str] = frozenset()
        self._selected: frozenset[str] = frozenset()
        self._counts: Counter[str] = Counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_compare_machine_info(self, compared_benchmark: Mapping[str, Any]) -> None:
        """Record the benchmarks of each file that pytest-benchmark compares with."""
        self._saved += compared_benchmark.get("benchmarks", [])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        """Record the names of the tests before any are deselected."""
        if self.history is not None or self.config.getoption("benchmark_compare", None):
            self._collected = frozenset(item.nodeid for item in items)
        return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the selected speed tests, which share the false alarms of the suite, and read the history."""
        speed_tests = sum(is_speed_test(item) for item in session.items)
        self.tests = max(1, speed_tests)
        self._selected = frozenset(item.nodeid for item in session.items)
        if speed_tests and self.history is not None and self.history.exists() and not why_disabled(self.config):
            from ampcheck.speed.baseline import EarlierHistory

            try:
                self._earlier = EarlierHistory.load(self.history)
                self._all_earlier = self._earlier.all()
            except UsageError as error:
                raise pytest.UsageError(f"--ampcheck-history={self.history}: {error}") from error

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test that has the fixture `speed` and did not use it."""
        __tracebackhide__ = True
        result = yield
        fixture = getattr(item, "funcargs", {}).get("speed")
        if isinstance(fixture, Speed) and not fixture.used:
            raise UsageError(
                f"{item.name} takes the fixture speed and never called it, so nothing was judged: "
                "call speed({...}) or speed.measure({...}), or remove the fixture"
            )
        return result

    @pytest.hookimpl(tryfirst=True)  # pytest-benchmark reads its marker when its fixture is created
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Set the timer of pytest-benchmark to one that returns the measured seconds."""
        __tracebackhide__ = True
        if is_speed_test(item):
            if not item.config.pluginmanager.has_plugin("pytest-benchmark"):
                raise UsageError("the fixture speed requires pytest-benchmark, which is off: remove -p no:benchmark")
            marker = item.get_closest_marker("benchmark")
            args, kwargs = (marker.args, marker.kwargs) if marker is not None else ((), {})
            item.stash[_TIMER] = timer = RecordedTimer()
            item.add_marker(pytest.mark.benchmark.with_args(*args, **{**kwargs, "timer": timer}), append=False)
        elif any(m.name == "ampcheck" and isinstance(m.kwargs.get("speed"), Mapping) for m in item.own_markers):
            raise UsageError(
                f"{item.name} is marked with ampcheck(speed=...) and does not take the fixture speed, so nothing would "
                "be measured: add it to the test's arguments"
            )

    def compare(self, records: Iterable[SpeedRecord], effect: float) -> list[Finding]:
        """Compare the records of a test with the baseline and the history."""
        from ampcheck.speed.baseline import check_baseline, check_names

        records, baseline = list(records), self._compared_with()
        findings = [] if baseline is None else check_baseline(records, baseline, effect=effect)
        return findings if self._all_earlier is None else findings + check_names(records, self._all_earlier)

    def add(self, records: Iterable[SpeedRecord], run: Run) -> None:
        """Add the records and the findings of a test."""
        self.records += records
        self._counts.update(str(finding.verdict) for finding in run.findings)

    @pytest.hookimpl(tryfirst=True)  # before the report is written
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Report missing benchmarks, and append to the history."""
        report = self.config.pluginmanager.get_plugin("ampcheck-report")
        if report is None:
            return
        interrupted = session.shouldstop or session.shouldfail
        if not interrupted and not why_disabled(self.config) and (findings := self._missing()):
            report.add(Run(findings=tuple(findings)))
        if self.history is not None:
            report.notes += self._append(session, self.history)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print one line if there is no report of findings that fail no test."""
        unseen = {verdict: count for verdict, count in self._counts.items() if verdict not in ("pass", "fail")}
        if unseen and not self.config.pluginmanager.has_plugin("ampcheck-report"):
            counts = ", ".join(f"{count} {verdict}" for verdict, count in unseen.items())
            terminalreporter.ensure_newline()
            terminalreporter.write_line(f"ampcheck: {counts} among the findings of speed tests; --ampcheck shows them")

    def _compared_with(self) -> Baseline | None:
        """The baseline of --benchmark-compare, which may be empty; None without the option."""
        if self._baseline is None and self.config.getoption("benchmark_compare", None):
            from ampcheck.speed.baseline import baseline_of

            self._baseline = baseline_of(self._saved)
        return self._baseline

    def _missing(self) -> list[Finding]:
        last = None if self._earlier is None else self._earlier.last(self.records)
        baselines = [baseline for baseline in (self._compared_with(), last) if baseline is not None]
        if not baselines:
            return []
        from ampcheck.speed.baseline import check_missing

        ran = {record.name for record in self.records}
        known = {name for baseline in baselines for name in baseline.known}
        excluded = {n for n in known if not should_have_run(self.config, n, self._collected, self._selected)}
        return [finding for baseline in baselines for finding in check_missing(ran | excluded, baseline)]

    def _append(self, session: pytest.Session, folder: Path) -> Iterator[str]:
        """Append all records at once; yield lines about it. A history that cannot be written fails the session."""
        yield from self._earlier.notes if self._earlier is not None else ()
        if not self.records:
            reason = why_disabled(self.config) or "no speed test measured anything"
            yield f"nothing was added to the history in {folder}: {reason}"
            return
        from ampcheck.speed.history.storage import append, commit_of

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
