"""The hooks and fixtures of the plugin. Unused, it imports nothing but pytest and its options.

Other imports are late: pytest rewrites the asserts of each module of a plugin that is imported, and compiles the module
at every start where it cannot write its cache, as in many containers.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest

from ampcheck.plugin.options import MARKERS, are_given
from ampcheck.plugin.options import add_options as pytest_addoption  # noqa: F401  # a hook

if TYPE_CHECKING:
    from ampcheck.plugin.golden_fixture import GoldenChecks
    from ampcheck.plugin.settings import Options
    from ampcheck.plugin.speed_fixture import Speed

_OPTIONS: pytest.StashKey[Options | None] = pytest.StashKey()
"""The options of a session that runs tests; None if none is given."""

_STDERR: pytest.StashKey[int] = pytest.StashKey()
"""A descriptor of standard error as it is outside of tests, which pytest captures."""

_QUIET = -2
"""The verbosity of `-qq`, with which no progress is shown."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; if tests are to run, also what the options need: the report, the session of speed tests."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    option = config.option
    if option.help or option.collectonly or option.markers or option.showfixtures:
        return
    if option.verbose > _QUIET and not hasattr(config, "workerinput"):
        with suppress(OSError, ValueError, AttributeError):  # there may be no standard error
            config.stash[_STDERR] = os.dup(sys.__stderr__.fileno())  # type: ignore[union-attr]
    junit, compare = (config.getoption(name, None) for name in ("xmlpath", "benchmark_compare"))
    if not (junit or compare or are_given(config)):
        config.stash[_OPTIONS] = None
        return
    from ampcheck.plugin.settings import Options

    options = config.stash[_OPTIONS] = Options.of(config)
    if options.enabled or junit:
        from ampcheck.plugin.summary import Collector, Report

        report = Report(options) if options.enabled and not hasattr(config, "workerinput") else None
        config.pluginmanager.register(Collector(options.update, config.rootpath), "ampcheck-collector")
        if report is not None:
            config.pluginmanager.register(report, "ampcheck-report")
        if options.watch is not None:
            from ampcheck.plugin.suite import Suite

            suite = Suite(config, options, options.watch, report, config.stash.get(_STDERR, None))
            config.pluginmanager.register(suite, "ampcheck-suite")
    if options.history is not None or compare:
        _register_speed_session(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close what was opened."""
    if (descriptor := config.stash.get(_STDERR, None)) is not None:
        del config.stash[_STDERR]
        os.close(descriptor)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """With `--ampcheck`, show that test files are imported, which takes seconds where they import torch."""
    options, descriptor = session.config.stash.get(_OPTIONS, None), session.config.stash.get(_STDERR, None)
    if options is None or not options.enabled or descriptor is None:
        return (yield)
    from ampcheck.plugin.progress import heartbeat

    with heartbeat("collecting tests", descriptor):
        return (yield)


@pytest.hookimpl(trylast=True)  # after plugins that add markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Register the session of speed tests if there are any, or tests that are marked as such."""
    if _OPTIONS in config.stash and any(map(_may_measure_speed, items)):
        _register_speed_session(config)


def _may_measure_speed(item: pytest.Item) -> bool:
    return "speed" in getattr(item, "fixturenames", ()) or any(
        marker.name == "ampcheck" and "speed" in marker.kwargs for marker in item.own_markers
    )


def _register_speed_session(config: pytest.Config) -> None:
    from ampcheck.plugin.speed_fixture import SESSION, SpeedSession

    if SESSION not in config.stash:
        options = config.stash[_OPTIONS]
        session = config.stash[SESSION] = SpeedSession(config, None if options is None else options.history)
        config.pluginmanager.register(session, "ampcheck-speed")


def _capture_no_trace() -> None:
    """Detach pytest's handlers from the trace of torch.compile.

    pytest 9 attaches them to each logger that does not propagate, such as this one, whose hundreds of records are for
    the tool tlparse; PyTorch builds them only where a handler listens. Other loggers are not changed.
    """
    trace = logging.Logger.manager.loggerDict.get("torch.__trace")
    if isinstance(trace, logging.Logger):
        for handler in [h for h in trace.handlers if type(h).__module__ == "_pytest.logging"]:
            trace.removeHandler(handler)


@pytest.hookimpl(tryfirst=True)  # before fixtures run; the wrapper that captures logs has begun
def pytest_runtest_setup() -> None:
    """Keep the trace of torch.compile out of the captured log of fixtures."""
    _capture_no_trace()


pytest_runtest_teardown = pytest_runtest_setup


@pytest.hookimpl(wrapper=True, trylast=True)  # the innermost wrapper: it observes the test and no other plugin
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the body of a test in the contexts that its marker and `--ampcheck-guard` require."""
    __tracebackhide__ = True
    _capture_no_trace()
    options = item.config.stash.get(_OPTIONS, None)
    guard = options is not None and options.guard
    with _progress_of(item):
        if not guard and ("ampcheck" not in item.keywords or item.get_closest_marker("ampcheck") is None):
            return (yield)
        from ampcheck.plugin.marker import observed

        with observed(item, guard=guard):
            return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Compare the two executions that a test marked with `parity` returns."""
    __tracebackhide__ = True
    if "ampcheck" not in pyfuncitem.keywords:
        return None
    from ampcheck.plugin.marker import compare_returned

    return compare_returned(pyfuncitem) or None


def _progress_of(item: pytest.Item) -> AbstractContextManager[None]:
    """Lines about a long test of a module that imports ampcheck; nothing with `-qq` and in workers of xdist."""
    descriptor = item.config.stash.get(_STDERR, None)
    if descriptor is None or "ampcheck" not in vars(getattr(item, "module", object)):
        return nullcontext()
    from ampcheck.plugin.progress import reported

    return reported(item, descriptor)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Report a failure at the user's code, without frames of ampcheck; `--full-trace` shows them."""
    if call.excinfo is not None and not item.config.getoption("fulltrace", False):
        from ampcheck.plugin.readable import hide_own_frames

        call.excinfo = hide_own_frames(item, call.excinfo)


@pytest.fixture(scope="session")
def ampcheck_device(pytestconfig: pytest.Config) -> str:
    """The device to test on, from `--ampcheck-device` or the ini file's `ampcheck_device`; `cpu` by default.

    Raises `ampcheck.UsageError` if this machine does not have it.
    """
    options = pytestconfig.stash[_OPTIONS]
    device = "cpu" if options is None else options.device
    if device != "cpu":
        from ampcheck.plugin.settings import require_device

        require_device(device)
    return device


@pytest.fixture
def speed(request: pytest.FixtureRequest, benchmark: Any, ampcheck_device: str) -> Speed:
    """Measure callables in turn and require a speedup: `speed({"eager": eager, "compiled": compiled}, at_least=1.2)`.

    Defaults come from `@pytest.mark.ampcheck(speed={...})`. pytest-benchmark stores and prints the times.
    """
    from ampcheck.plugin.speed_fixture import Speed

    return Speed(request.node, benchmark, ampcheck_device)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> GoldenChecks:
    """Compare what a function gives with a file of exact values: `golden.check("logits", model, tokens)`.

    A change in the last digits passes, a change of what is computed fails. `--ampcheck-update` writes the file.
    """
    from ampcheck.plugin.golden_fixture import GoldenChecks

    return GoldenChecks(request.node)
