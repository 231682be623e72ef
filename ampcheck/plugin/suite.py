"""`--ampcheck-watch`: each test of a suite runs as it is, and once more under AMP and watched.

The first run is the test's own: its result, its reports, the random numbers that later tests draw. The second has
fixtures of its own, but for those of a class, a module or the session; what it finds is a finding of the session. Where
it fails, the test runs under AMP without the watch, and as it is, which tells why.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.runner import runtestprotocol

from ampcheck.core.run import FAIL_ON, Finding, Run, Verdict, Where, merge
from ampcheck.core.text import counted
from ampcheck.plugin.settings import Options, WatchOptions

if TYPE_CHECKING:
    from ampcheck.plugin.circumstances import Circumstances
    from ampcheck.plugin.summary import Report
    from ampcheck.watch import Watched

_CREDIT = 30.0
"""Seconds that the watch of a suite may take beyond its budget: entering a watch alone costs some hundredths."""

_LEAST = 0.1
"""Seconds below which to begin the watch of a test is in vain."""

_NAMED = 10
"""So many tests of a kind are named below the summary; `-vv` names all."""

_MEASURES = ("benchmark", "speed")
"""Fixtures of tests that measure time: under a watch they would measure the watch."""

PASSED, FAILED, ENDED, SKIPPED = "passed", "failed", "ended", "skipped"


@dataclass
class Account:
    """The seconds that watches may take: `factor` times those that the tests took themselves, and a credit."""

    factor: float
    tests: float = 0.0
    watches: float = 0.0

    def limit(self, seconds: float) -> float:
        """Enter the time of a test; the seconds that its watch may take: its own share, and half of what is left over."""
        self.tests += seconds
        share, left = self.factor * seconds, self.factor * self.tests + _CREDIT - self.watches
        return left if left < share else share + (left - share) / 2


@dataclass
class Outcomes:
    """What a process of the session has watched, as it travels to the one that owns the terminal.

    start: seconds to import what a watch needs and to probe policies, which no budget counts. runs: test to its run, as JSON. own: tests that fail under AMP by themselves, with the error. ended: those whose
    watch was ended by the budget; left_out: those that it left out; both with their own seconds. unlike: tests that do
    not pass a second time as they are.
    """

    tests: float = 0.0
    watches: float = 0.0
    start: float = 0.0
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, float] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)
    failing: int = 0

    def add(self, other: Outcomes) -> None:
        """Add those of another process."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, {**mine, **value} if isinstance(mine, dict) else mine + value)


class Suite:
    """The plugin of `--ampcheck-watch`. report: of the process that owns the terminal; None in a worker of xdist."""

    def __init__(self, config: pytest.Config, options: Options, watch: WatchOptions, report: Report | None) -> None:
        self._config, self._options, self._watch, self._report = config, options, watch, report
        self._account = Account(watch.budget)
        self._outcomes = Outcomes()
        self._inside = False
        self._plain: dict[str, str] = {}
        self._error: BaseException | None = None
        self._watched: Watched | None = None
        self._circumstances: Circumstances | None = None

    # Running: where tests run ----------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run the test as it is, through all plugins, and then watched, before its wider fixtures are torn down."""
        if self._inside or not _is_watchable(item):
            return None
        self._inside, self._plain = True, {}
        try:
            began, random = perf_counter(), _random_state()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=item.parent)
            seconds = perf_counter() - began
            if not (item.session.shouldstop or item.session.shouldfail):
                self._follow(item, seconds, random)
            self._tear_down(item, nextitem)
        finally:
            self._inside = False
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a phase of the test ended as it is."""
        self._plain[report.when or ""] = "xfailed" if hasattr(report, "wasxfail") else report.outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """Note the error of a test that runs watched."""
        report = yield
        if self._inside and report.failed and call.excinfo is not None:
            self._error = self._error or call.excinfo.value
        return report

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[Any]:
        """Judge what is alive when the body of a watched test ends, before fixtures are torn down."""
        try:
            return (yield)
        finally:
            if self._watched is not None and self._watched.shadow is not None:
                self._watched.shadow.reach_ends()

    def _follow(self, item: pytest.Item, seconds: float, random: Any) -> None:
        """Run the test under AMP and watched, where it passes as it is."""
        outcomes = self._outcomes
        if "torch" not in sys.modules or set(self._plain.values()) != {PASSED}:
            outcomes.failing += FAILED in self._plain.values()
            return
        if not outcomes.start:
            outcomes.start = self._begin()
        limit = self._account.limit(seconds)
        outcomes.tests = self._account.tests
        if limit < _LEAST:
            outcomes.left_out[item.nodeid] = seconds
            return
        from ampcheck.torchtools.restore import save_random_state

        after, began = save_random_state(), perf_counter()
        try:
            run = self._judged(item, limit, random, seconds)
            if run is not None:
                outcomes.runs[item.nodeid] = run.to_json()
        finally:
            after()
            self._account.watches += perf_counter() - began
            outcomes.watches = self._account.watches

    def _begin(self) -> float:
        """Watch one op, so that the first test does not pay for what is done once; the seconds that it took."""
        import torch

        from ampcheck.torchtools.restore import save_random_state

        began, restore = perf_counter(), save_random_state()
        with self._under_amp(None):
            watch = self._watch_of("the start")
            with watch:
                torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1))
            watch.run  # noqa: B018  # reads the policies
        restore()
        return perf_counter() - began

    def _watch_of(self, subject: str, *, compiled: bool = False) -> Watched:
        from ampcheck.autocast.guards.checks import GUARD_CHECKS
        from ampcheck.catalog.autocast import AUTOCAST_THREAD
        from ampcheck.watch import OP_CHECKS, watched

        # A thread that loads data is not under the autocast that we put around the test.
        checks = None if compiled else (*OP_CHECKS, *(c for c in GUARD_CHECKS if c != AUTOCAST_THREAD.slug))
        return watched(checks=checks, name=subject, compiled=compiled)

    def _judged(self, item: pytest.Item, limit: float, random: Any, seconds: float) -> Run | None:
        from ampcheck.core.settings import load_settings
        from ampcheck.outcome.accept import accept
        from ampcheck.outcome.raising import with_commands
        from ampcheck.core.current_test import pytest_command

        outcome, run, compiled = self._run(item, random, limit=limit)
        runs = [run]
        if outcome == ENDED:
            self._outcomes.ended[item.nodeid] = seconds
        elif outcome == FAILED:
            findings = self._explained(item, random)
            shown = {f.where.place for f in run.of(Verdict.FAIL)}  # a check that says more of the same line
            runs.append(Run(findings=tuple(f for f in findings if not f.where.file or f.where.place not in shown)))
        elif compiled and self._watch.compile:
            outcome, run, _ = self._run(item, random, compiled=True)
            runs = [_without_eager_note(runs[0]), run]
            if outcome == FAILED:
                self._outcomes.own[item.nodeid] = f"compiled: {_brief(self._error)}"
        self._error = None
        flags = [f"--ampcheck-watch --ampcheck-dtype={self._watch.dtype}"]
        flags += [f"--ampcheck-device={self._options.device}"] if self._options.device != "cpu" else []
        flags += ["--ampcheck-compile"] if self._watch.compile else []
        command = " ".join((pytest_command(item.nodeid), *flags))
        return with_commands(accept(merge(runs), load_settings()), lambda finding: command)

    def _run(
        self, item: pytest.Item, random: Any, *, limit: float = float("inf"), compiled: bool = False
    ) -> tuple[str, Run, bool]:
        """Run the test watched: how it ended, what was found, and whether it called compiled functions.

        compiled: let them run compiled, and judge the values inside.
        """
        from ampcheck.core.errors import EnoughSteps

        began = perf_counter()
        with self._under_amp(random) as circumstances:
            watch = self._watch_of(f"{item.nodeid} {self._watch.label}", compiled=compiled)
            watch.__enter__()
            self._watched = watch
            if watch.shadow is not None:
                watch.shadow.until = began + limit
            try:
                with circumstances.within():
                    outcome = self._attempt(item)
            finally:
                self._watched, error = None, self._error
                watch.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
            if isinstance(error, EnoughSteps):
                outcome = ENDED
            calls = watch.shadow is not None and watch.shadow.compiled > 0
            return outcome, _silent_without_values(watch.run), calls

    @contextmanager
    def _under_amp(self, random: Any) -> Iterator[Circumstances]:
        """The circumstances, entered, with the random numbers that the test drew as it is."""
        if self._circumstances is None:
            from ampcheck.plugin.circumstances import Circumstances

            self._circumstances = Circumstances(self._watch.dtype, self._options.device)
        with self._circumstances.around():
            if random is not None:
                random()
            yield self._circumstances

    def _attempt(self, item: pytest.Item) -> str:
        """Run the test once more with new fixtures, without reports."""
        self._error = None
        with warnings.catch_warnings(record=True):
            reports = runtestprotocol(item, nextitem=item.parent, log=False)  # type: ignore[arg-type]
        ends = {"xfailed" if hasattr(report, "wasxfail") else report.outcome for report in reports}
        return FAILED if FAILED in ends else SKIPPED if ends - {PASSED} else PASSED

    def _explained(self, item: pytest.Item, random: Any) -> Iterator[Finding]:
        """Why a test fails watched: under AMP, for its own reason or that of the code it tests; or by our doing."""
        from ampcheck.catalog import REGISTRY

        error, name = self._error, item.nodeid
        with self._under_amp(random) as circumstances, circumstances.within():
            outcome = self._attempt(item)
        subject = f"{name} {self._watch.label}"
        if outcome != FAILED:
            text = f"not judged to its end: the test passes {self._watch.label}, and raised {_brief(error)} when watched"
            yield REGISTRY["coverage"].incomplete(subject, text, hint="a limit on time may have caused it")
            return
        error = self._error
        if random is not None:
            random()
        if self._attempt(item) == FAILED:
            self._outcomes.unlike[name] = _brief(self._error)
            return
        place = _place_in_library(error)
        if place is None or "autocast" not in self._watch.label:
            self._outcomes.own[name] = _brief(error)
            return
        check = REGISTRY["low-precision-error"]
        text = f"what runs in float32 must also run {self._watch.label}; it raised {_brief(error)}"
        yield check.fail(subject, text, where=place, hint=check.fix)

    def _tear_down(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Tear down the fixtures that the next test does not need; an error is one of this test."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with capture.item_capture("teardown", item) if capture is not None else nullcontext():
            call = pytest.CallInfo.from_call(
                lambda: item.session._setupstate.teardown_exact(nextitem),
                when="teardown",
                reraise=(pytest.exit.Exception, KeyboardInterrupt),
            )
        if call.excinfo is not None:
            report = pytest.TestReport.from_item_and_call(item, call)
            item.ihook.pytest_runtest_logreport(report=report)

    # Reporting: the process that owns the terminal -------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker has watched."""
        text = getattr(node, "workeroutput", {}).get("ampcheck_suite")
        if text is not None:
            self._outcomes.add(Outcomes(**json.loads(text)))
        elif self._report is not None:
            self._report.notes.append(f"what worker {node.gateway.id} has watched is lost: it did not end regularly")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand the outcomes to the report; findings fail the session as `fail-on` says."""
        if self._report is None:
            self._config.workeroutput["ampcheck_suite"] = json.dumps(asdict(self._outcomes))  # type: ignore[attr-defined]
            return
        from ampcheck.core.settings import load_settings

        runs = {name: Run.from_json(data) for name, data in self._outcomes.runs.items()}
        label = self._watch.label
        for name, run in runs.items():
            self._report.add_watched(f"{name} {label}", run)
        self._report.notes += _notes(self._outcomes, label, verbose=self._config.option.verbose > 1)
        fatal = FAIL_ON[load_settings().fail_on]
        if any(finding.verdict in fatal for run in runs.values() for finding in run.findings):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def _is_watchable(item: pytest.Item) -> bool:
    """Whether a test can run twice and is not watched or measured already."""
    measures = set(_MEASURES) & set(getattr(item, "fixturenames", ()))
    return isinstance(item, pytest.Function) and not measures and item.get_closest_marker("ampcheck") is None


def _random_state() -> Any:
    """The random numbers to come, as a function that restores them; None before PyTorch is imported."""
    if "torch" not in sys.modules:
        return None
    from ampcheck.torchtools.restore import save_random_state

    return save_random_state()


def _silent_without_values(run: Run) -> Run:
    """The run without skips, and without `coverage` for a test in which nothing floats."""

    def says_something(finding: Finding) -> bool:
        lacks = finding.check == "coverage" and finding.verdict is not Verdict.PASS
        return finding.verdict is not Verdict.SKIP and (not lacks or bool(run.coverage.unseen))

    return replace(run, findings=tuple(filter(says_something, run.findings)))


def _without_eager_note(run: Run) -> Run:
    """The run without the note that compiled functions ran in eager mode: they also ran compiled."""
    unseen = {why: count for why, count in run.coverage.unseen.items() if "compiled functions" not in why}
    kept = tuple(f for f in run.findings if f.check != "coverage" or unseen or f.verdict is Verdict.PASS)
    return replace(run, findings=kept, coverage=replace(run.coverage, unseen=unseen))


def _brief(error: BaseException | None) -> str:
    from ampcheck.core.errors import brief

    return "an error" if error is None else brief(error).splitlines()[0]


def _place_in_library(error: BaseException | None) -> Where | None:
    """The line that raised; None where an assertion failed, or the code of the tests raised."""
    from ampcheck.torchtools.source import is_users, short_path

    runners = ("_pytest", "pytest", "pluggy", "unittest", "hypothesis", "numpy")
    if error is None or isinstance(error, AssertionError) or type(error).__module__.startswith(runners):
        return None
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_users(frame.f_code.co_filename) and not frame.f_globals.get("__name__", "").startswith(runners)
    ]
    if not frames:
        return None
    frame, line = frames[-1]
    path = frame.f_code.co_filename
    is_rewritten = isinstance(frame.f_globals.get("__loader__"), AssertionRewritingHook)  # a test, a conftest
    is_helper = not {"test", "tests", "testing"}.isdisjoint(path.replace("\\", "/").split("/"))
    return None if is_rewritten or is_helper else Where("forward", file=short_path(path), line=line)


def _notes(outcomes: Outcomes, label: str, *, verbose: bool) -> Iterator[str]:
    """What the summary says about the session beside its findings."""
    watched = len(outcomes.runs)
    total = (outcomes.tests + outcomes.watches) / outcomes.tests if outcomes.tests else 1.0
    yield (
        f"watched {counted(watched, 'tests')} {label}: {outcomes.watches:.1f} s beside {outcomes.tests:.1f} s of the "
        f"tests themselves, {total:.1f}x in all, and {outcomes.start:.1f} s to start"
    )
    if outcomes.failing:
        yield f"not watched, as they fail without AMP: {counted(outcomes.failing, 'tests')}"
    limit = None if verbose else _NAMED
    kinds = {
        f"fails {label}: its own assertion": outcomes.own,
        "not judged, as it does not pass a second time": outcomes.unlike,
        "watched in part, the budget ended it (--ampcheck-budget)": _seconds(outcomes.ended),
        "not watched, beyond the budget (--ampcheck-budget)": _seconds(outcomes.left_out),
    }
    for text, tests in kinds.items():
        yield from (f"{text}: {name} ({why})" for name, why in list(tests.items())[:limit])
        if more := len(tests) - len(list(tests)[:limit]):
            yield f"{text}: {counted(more, 'more tests')}; -vv names them"


def _seconds(tests: dict[str, float]) -> dict[str, str]:
    """Tests with their own time, the slowest first."""
    return {name: f"{tests[name]:.1f} s" for name in sorted(tests, key=lambda name: -tests[name])}
