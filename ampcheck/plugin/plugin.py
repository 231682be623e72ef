"""The hooks and fixtures of the plugin. Unused, it imports nothing but pytest and its options.

Other imports are late: pytest rewrites the asserts of each module of a plugin that is imported, and compiles the module
at every start where it cannot write its cache, as in many containers.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from ampcheck.plugin.options import MARKER, Options
from ampcheck.plugin.options import add_options as pytest_addoption  # noqa: F401  # a hook
from ampcheck.plugin.readable import capture_no_trace, hide_own_frames

if TYPE_CHECKING:
    from ampcheck.plugin.speed_fixture import Speed

_OPTIONS = pytest.StashKey[Options]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; if tests are to run, also what the options need: the report, the session of speed tests."""
    config.addinivalue_line("markers", MARKER)
    option = config.option
    if option.help or option.collectonly or option.markers or option.showfixtures:
        return
    options = config.stash[_OPTIONS] = Options.of(config)
    if options.enabled or options.junit:
        from ampcheck.plugin.summary import Collector, Report

        config.pluginmanager.register(Collector(options.update, config.rootpath), "ampcheck-collector")
        if options.enabled and not hasattr(config, "workerinput"):
            config.pluginmanager.register(Report(options), "ampcheck-report")
    if options.history is not None or config.getoption("benchmark_compare", None):
        _register_speed_session(config, options)


@pytest.hookimpl(trylast=True)  # after plugins that add markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Register the session of speed tests if there are any, or tests that are marked as such."""
    options = config.stash.get(_OPTIONS, None)
    if options is not None and any(map(_may_measure_speed, items)):
        _register_speed_session(config, options)


def _may_measure_speed(item: pytest.Item) -> bool:
    return "speed" in getattr(item, "fixturenames", ()) or any(
        marker.name == "ampcheck" and "speed" in marker.kwargs for marker in item.own_markers
    )


def _register_speed_session(config: pytest.Config, options: Options) -> None:
    from ampcheck.plugin.speed_fixture import SESSION, SpeedSession

    if SESSION not in config.stash:
        session = config.stash[SESSION] = SpeedSession(config, options.history)
        config.pluginmanager.register(session, "ampcheck-speed")


@pytest.hookimpl(tryfirst=True)  # before fixtures run; the wrapper that captures logs has begun
def pytest_runtest_setup() -> None:
    """Keep the trace of torch.compile out of the captured log of fixtures."""
    capture_no_trace()


pytest_runtest_teardown = pytest_runtest_setup


@pytest.hookimpl(wrapper=True, trylast=True)  # the innermost wrapper: it observes the test and no other plugin
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the body of a test in the contexts that its marker and `--ampcheck-guard` require."""
    __tracebackhide__ = True
    capture_no_trace()
    options = item.config.stash.get(_OPTIONS, None)
    guard = options is not None and options.guard
    if not guard and item.get_closest_marker("ampcheck") is None:
        return (yield)
    from ampcheck.core.errors import UsageError
    from ampcheck.plugin.marker import MarkerArguments, run_marked

    arguments = MarkerArguments.of(item)
    if guard:
        arguments = arguments.with_guard()
    if not arguments.wraps:
        return (yield)
    raised: BaseException | None = None
    try:
        with run_marked(item, arguments):
            try:
                return (yield)
            except BaseException as error:
                raised = error
                raise
    except (AssertionError, UsageError) as error:
        if error is raised:
            raise
        raise error.with_traceback(None) from None  # the message names the location; frames of ampcheck do not help


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Report a failure at the user's code, without frames of ampcheck; `--full-trace` shows them."""
    if call.excinfo is not None and not item.config.getoption("fulltrace", False):
        call.excinfo = hide_own_frames(item, call.excinfo)


@pytest.fixture(scope="session")
def ampcheck_device(pytestconfig: pytest.Config) -> str:
    """The device to test on, from `--ampcheck-device` or the ini file's `ampcheck_device`; `cpu` by default.

    Raises `ampcheck.UsageError` if this machine does not have it.
    """
    device = pytestconfig.stash[_OPTIONS].device
    if device != "cpu":
        _require_device(device)
    return device


@pytest.fixture
def speed(request: pytest.FixtureRequest, benchmark: Any, ampcheck_device: str) -> Speed:
    """Measure callables in turn and require a speedup: `speed({"eager": eager, "compiled": compiled}, at_least=1.2)`.

    Defaults come from `@pytest.mark.ampcheck(speed={...})`. pytest-benchmark stores and prints the times.
    """
    from ampcheck.plugin.speed_fixture import Speed

    return Speed(request.node, benchmark, ampcheck_device)


def _require_device(device: str) -> None:
    import torch

    from ampcheck.core.errors import UsageError

    kind, _, index = device.partition(":")
    backend: Any = torch.backends.mps if kind == "mps" else getattr(torch, kind)
    if not backend.is_available():
        raise UsageError(f"--ampcheck-device={device}: PyTorch {torch.__version__} finds no such device here, use cpu")
    if index and int(index) >= (count := backend.device_count()):
        raise UsageError(f"--ampcheck-device={device}: this machine has {count} of them, the first is {kind}:0")
