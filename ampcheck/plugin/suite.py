"""`--ampcheck-watch`: run a suite without AMP, then watch the tests that passed while they run again under AMP.

The first pass gives the suite's results, its reports, and the random numbers that tests draw. The second begins when
the fixtures of the first, also those of the session, are torn down, and sets up its own; what it finds is a finding of
the session. A test that fails in it runs twice more, under AMP without the watch and without AMP, to find out why.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

import pytest

from ampcheck.checks import REGISTRY
from ampcheck.core.current_test import pytest_command
from ampcheck.core.errors import EnoughSteps, UsageError
from ampcheck.core.run import FAIL_ON, Finding, Run, Verdict, merge
from ampcheck.core.settings import load_settings
from ampcheck.core.text import counted
from ampcheck.outcome.accept import accept
from ampcheck.outcome.raising import with_commands
from ampcheck.plugin.attempts import tear_down, unreported
from ampcheck.plugin.outcomes import (
    Outcomes,
    lacks_evidence,
    notes,
    place_in_library,
    shortened,
    silent,
    without_eager_note,
)
from ampcheck.plugin.settings import Options, WatchOptions

if TYPE_CHECKING:
    from ampcheck.plugin.circumstances import Circumstances
    from ampcheck.plugin.summary import Report
    from ampcheck.watch import Watched

_LEAST = 0.1
"""Seconds below which to begin the watch of a test is in vain."""

_MEASURES = ("benchmark", "speed")
"""Fixtures of tests that measure time: under a watch they would measure the watch."""

PASSED, FAILED, ENDED, SKIPPED = "passed", "failed", "ended", "skipped"


@dataclass(frozen=True)
class _Passed:
    """A test that passed without AMP: its seconds, and functions that restore the random state at which it and its body
    began."""

    item: pytest.Item
    seconds: float
    random: Any
    random_of_body: Any


class Suite:
    """The plugin of `--ampcheck-watch`. report: of the process that owns the terminal; None in a worker of xdist.
    descriptor: of standard error, for progress."""

    def __init__(
        self,
        config: pytest.Config,
        options: Options,
        watch: WatchOptions,
        report: Report | None,
        descriptor: int | None = None,
    ) -> None:
        self._config, self._options, self._watch, self._report = config, options, watch, report
        self._descriptor = descriptor
        self._passed: list[_Passed] = []
        self._drawn: object = None
        self._state: Any = None
        self._random: Any = None
        self._outcomes = Outcomes()
        self._inside = False
        self._plain: dict[str, str] = {}
        self._error: BaseException | None = None
        self._watched: Watched | None = None
        self._circumstances: Circumstances | None = None

    # Running: where tests run ----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Run the tests of this process through all plugins, and then watch those that passed."""
        try:
            ended = yield
        except (session.Failed, session.Interrupted):  # -x, --stepwise
            self._follow_all(session)
            raise
        self._follow_all(session)
        return ended

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note how a test ended, how long it took, and the random numbers that it began with."""
        if self._inside:
            return (yield)
        self._plain = {}
        watchable, began, random = _is_watchable(item), perf_counter(), self._random_state()
        result = yield
        if watchable and set(self._plain.values()) == {PASSED}:
            self._passed.append(_Passed(item, perf_counter() - began, random, self._random))
        elif watchable and FAILED in self._plain.values():
            self._outcomes.failing[item.nodeid] = ""
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record how a phase of the test ended without AMP; a failing subtest has a report of its own."""
        if report.when == "setup":  # of another try, too
            self._plain = {}
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        self._plain[report.when] = FAILED if self._plain.get(report.when) == FAILED else outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the error of a test that runs watched."""
        report = yield
        if self._inside and report.failed and call.excinfo is not None:
            self._error = self._error or call.excinfo.value
        return report

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[Any]:
        """Restore the random state at which the body began without AMP, whatever its fixtures drew since; judge what is
        alive when the body of a watched test ends, before fixtures are torn down."""
        if not self._inside:
            self._random = self._random_state()
        elif self._random is not None:
            self._random()
        try:
            return (yield)
        finally:
            if self._watched is not None and self._watched.shadow is not None:
                self._watched.shadow.reach_ends()

    def _follow_all(self, session: pytest.Session) -> None:
        """Watch the tests that passed, in their order."""
        if "torch" not in sys.modules or not self._passed:
            return
        with self._progress(len(self._passed)) as next_test, pytest.MonkeyPatch.context() as patch:
            for name in ("_shouldfail", "_shouldstop"):  # with which pytest tears down all fixtures after each test
                patch.setattr(session, name, False, raising=False)
            tear_down(session, None)
            for passed in self._passed:
                next_test(passed.item)
                tear_down(session, passed.item)
                self._random = passed.random_of_body
                self._follow(passed.item, passed.seconds, passed.random)
            tear_down(session, None)

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[pytest.Item], None]]:
        """Report every few seconds which test is watched; nothing in workers of xdist."""
        if self._descriptor is None:
            yield lambda item: None
            return
        from ampcheck.plugin.progress import heartbeat

        with heartbeat(f"watching {counted(total, 'tests')} {self._watch.label}", self._descriptor) as beat:
            numbers = count(1)
            yield lambda item: beat.step(f"watching {item.name} {self._watch.label} ({next(numbers)} of {total})")

    def _random_state(self) -> Any:
        """The random numbers to come, as a function that restores them; None before PyTorch is imported. Tests that
        draw nothing share one."""
        if "torch" not in sys.modules:
            return None
        from ampcheck.torchtools.restore import random_state_key, save_random_state

        if (key := random_state_key()) != self._drawn:
            self._drawn, self._state = key, save_random_state()
        return self._state

    def _follow(self, item: pytest.Item, seconds: float, random: Any) -> None:
        """Run a test under AMP and watched."""
        outcomes = self._outcomes
        if not outcomes.start:
            outcomes.start = self._begin()
        limit = outcomes.limit(seconds, self._watch.budget)
        if limit < _LEAST:
            outcomes.left_out[item.nodeid] = seconds
            return
        from ampcheck.torchtools.restore import save_random_state

        after, began = save_random_state(), perf_counter()
        try:
            outcomes.runs[item.nodeid] = self._judged(item, limit, random, seconds).to_json()
        except Exception as error:  # noqa: BLE001  # a defect of ampcheck, which must not end the session
            text = f"not judged: ampcheck raised {shortened(error)}; please report it"
            finding = REGISTRY["coverage"].incomplete(f"{item.nodeid} {self._watch.label}", text)
            outcomes.runs[item.nodeid] = Run(findings=(finding,)).to_json()
        finally:
            after()
            outcomes.watches += perf_counter() - began

    def _begin(self) -> float:
        """Watch one op, so that the first test does not pay for what is done once; the seconds that it took."""
        import torch

        from ampcheck.torchtools.restore import save_random_state

        began, restore = perf_counter(), save_random_state()
        try:
            accept(Run(), load_settings())
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
        with self._under_amp(None):
            watch = self._watch_of("the start")
            with watch:
                torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1))
            watch.run  # noqa: B018  # reads the policies
        restore()
        return perf_counter() - began

    def _watch_of(self, subject: str, *, compiled: bool = False) -> Watched:
        from ampcheck.autocast.guards.guard import GUARD_CHECKS
        from ampcheck.checks.autocast.autocast_thread import CHECK as AUTOCAST_THREAD
        from ampcheck.checks.policy.policy_banned import CHECK as POLICY_BANNED
        from ampcheck.watch import watched
        from ampcheck.watch_families import OP_CHECKS

        # A thread that loads data is not under the autocast that we put around the test; nor is that of CUDA, unless
        # it is asked for.
        unasked = {AUTOCAST_THREAD.slug} | ({POLICY_BANNED.slug} if self._options.device == "cpu" else set())
        checks = None if compiled else (*OP_CHECKS, *(c for c in GUARD_CHECKS if c not in unasked))
        return watched(checks=checks, name=subject, compiled=compiled)

    def _judged(self, item: pytest.Item, limit: float, random: Any, seconds: float) -> Run:
        """Return what the watch of a test finds, as the repository judges it."""
        outcome, run, compiled = self._run(item, random, limit=limit)
        runs = [run]
        if outcome == ENDED:
            self._outcomes.ended[item.nodeid] = seconds
        elif outcome == FAILED:
            runs[0] = replace(run, findings=tuple(f for f in run.findings if not lacks_evidence(f)))
            findings = self._explained(item, random)
            shown = {f.where.place for f in run.of(Verdict.FAIL)}  # a check that says more of the same line
            runs.append(Run(findings=tuple(f for f in findings if not f.where.file or f.where.place not in shown)))
        elif compiled and self._watch.compile:
            outcome, run, _ = self._run(item, random, compiled=True)
            runs = [without_eager_note(runs[0]), run]
            if outcome == FAILED:
                self._outcomes.own[item.nodeid] = f"compiled: {shortened(self._error)}"
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
            late = watch.shadow is not None and perf_counter() > watch.shadow.until
            if isinstance(error, EnoughSteps) or (late and outcome == FAILED):  # the test may have caught it
                outcome = ENDED
            calls = watch.shadow is not None and watch.shadow.compiled > 0
            return outcome, silent(watch.run, item), calls

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
        """Run the test once more through all plugins, without reports."""
        self._error, self._inside = None, True
        try:
            with warnings.catch_warnings(record=True), unreported(item) as reports:
                item.ihook.pytest_runtest_protocol(item=item, nextitem=item.parent)
        finally:
            self._inside = False
        ends = {"xfailed" if hasattr(report, "wasxfail") else report.outcome for report in reports}
        return FAILED if FAILED in ends else SKIPPED if ends - {PASSED} else PASSED

    def _explained(self, item: pytest.Item, random: Any) -> Iterator[Finding]:
        """Why a test fails watched: under AMP, for its own reason or that of the code it tests; or by our doing."""
        try:
            yield from self._compared(item, random)
        finally:
            tear_down(item.session, None)  # the next test is watched with fixtures that are

    def _compared(self, item: pytest.Item, random: Any) -> Iterator[Finding]:
        """Run the test twice more with fixtures of its own, under AMP and then without, and yield what that shows."""
        error, name = self._error, item.nodeid
        tear_down(item.session, None)
        with self._under_amp(random) as circumstances, circumstances.within():
            outcome = self._attempt(item)
        subject = f"{name} {self._watch.label}"
        if outcome != FAILED:
            text = f"not judged to its end: it passes {self._watch.label}, and raised {shortened(error)} when watched"
            hint = "a limit on time may be the cause, or what no dispatch mode can follow, such as torch.jit.trace"
            yield REGISTRY["coverage"].incomplete(subject, text, hint=hint)
            return
        error = self._error
        tear_down(item.session, None)
        if random is not None:
            random()
        if self._attempt(item) == FAILED:
            self._outcomes.unlike[name] = shortened(self._error)
            return
        place = place_in_library(error)
        if place is None or "autocast" not in self._watch.label:
            self._outcomes.own[name] = shortened(error)
            return
        check = REGISTRY["low-precision-error"]
        text = f"what runs in float32 must also run {self._watch.label}; it raised {shortened(error)}"
        yield check.fail(subject, text, where=place, hint=check.fix)

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

        runs = {name: Run.from_json(data) for name, data in self._outcomes.runs.items()}
        label = self._watch.label
        for name, run in runs.items():
            self._report.add(run, f"{name} {label}")
        self._report.notes += notes(self._outcomes, label, verbose=self._config.option.verbose > 1)
        fail_on = load_settings().fail_on
        fatal = [f for run in runs.values() for f in run.findings if f.verdict in FAIL_ON[fail_on]]
        if fatal:
            self._report.notes.append(f"findings fail the session (fail-on = {fail_on}), whatever the tests' results")
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def _is_watchable(item: pytest.Item) -> bool:
    """Return whether a test can run twice and is not watched or measured already."""
    measures = set(_MEASURES) & set(getattr(item, "fixturenames", ()))
    return isinstance(item, pytest.Function) and not measures and item.get_closest_marker("ampcheck") is None
