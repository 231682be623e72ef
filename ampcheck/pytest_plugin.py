"""The pytest plugin: options, the marker, the fixture, header, summary and reports; no numerics.

What a test emits (`ampcheck.record.emit`) is gathered around its phases, travels as plain data on the report of its
teardown, and is merged in the order of node ids by the process that owns the terminal, so `-n 2` says what `-n 0` says.
A fixture wider than one test runs once in each worker of xdist, and what it emits counts as often.

Unused, the plugin imports nothing but pytest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from ampcheck.errors import UsageError

if TYPE_CHECKING:
    from ampcheck.record import Run, Table

DEVICES = ("cpu", "cuda", "cuda:N", "xpu", "xpu:N", "mps")
"""What `--ampcheck-device` takes, N being the index of a device."""

MARKER = (
    "ampcheck(*checks): observe the test's body and fail it with the findings of these checks, "
    "such as 'overflow'; without names, of every check that an observation can judge. The closest marker counts."
)

OPTIONS = {
    "--ampcheck": ("", "show what ampcheck's asserts and marked tests found, and what they looked at"),
    "--ampcheck-html": ("PATH", "write the findings as one HTML page; implies --ampcheck"),
    "--ampcheck-json": ("PATH", "write the findings as JSON; implies --ampcheck"),
    "--ampcheck-device": ("DEVICE", f"device of the fixture ampcheck_device: {', '.join(DEVICES)} (default: cpu)"),
}
"""Flag to the name of its value ("" for a switch) and its help. `--ampcheck-html` is `ampcheck_html` in an ini file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add every option and its ini twin."""
    group = parser.getgroup("ampcheck", "mixed precision and compilation (ampcheck)")
    for flag, (value, text) in OPTIONS.items():
        form: dict[str, Any] = {"metavar": value} if value else {"action": "store_const", "const": True}
        group.addoption(flag, default=None, help=text, **form)
        kind: Literal["string", "bool"] = "string" if value else "bool"
        parser.addini(flag[2:].replace("-", "_"), help=text, type=kind, default=None)


@dataclass(frozen=True)
class Settings:
    """What the options and the ini file ask for. `html` and `json` are absolute; a worker of xdist has neither."""

    enabled: bool
    device: str
    html: Path | None = None
    json: Path | None = None

    @classmethod
    def of(cls, config: pytest.Config) -> Settings:
        """Read and judge the options. Raises `pytest.UsageError` for what cannot be done."""
        html, json = (_value(config, name) for name in ("ampcheck_html", "ampcheck_json"))
        device = _parse_device(_value(config, "ampcheck_device"))
        enabled = bool(_value(config, "ampcheck")) or html is not None or json is not None
        if hasattr(config, "workerinput"):
            return cls(enabled, device)
        here = config.invocation_params.dir
        paths = _parse_path("--ampcheck-html", html, here), _parse_path("--ampcheck-json", json, here)
        if paths[0] is not None and paths[0] == paths[1]:
            raise pytest.UsageError(f"--ampcheck-html and --ampcheck-json need a file each, both are {html}")
        return cls(enabled, device, *paths)


def _value(config: pytest.Config, name: str) -> Any:
    given = config.getoption(name)
    try:
        return config.getini(name) if given is None else given
    except (TypeError, ValueError, pytest.UsageError) as error:
        raise pytest.UsageError(f"{name} of the ini file cannot be read: {error}") from error


def _parse_device(given: str | None) -> str:
    if given is None:
        return "cpu"
    if not re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d+)?", given):
        raise pytest.UsageError(f"--ampcheck-device={given} is no device: choose one of {', '.join(DEVICES)}")
    return given


def _parse_path(flag: str, given: str | None, here: Path) -> Path | None:
    if given is None:
        return None
    path = Path(os.path.abspath(here / given))
    if not given or path.is_dir():
        raise pytest.UsageError(f"{flag}={given} needs the name of a file, not of a folder")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise pytest.UsageError(f"{flag}={given} needs a folder that exists and can be written to: {path.parent}")
    return path


_SETTINGS = pytest.StashKey[Settings]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the two halves of the report where tests are to run and one is wanted."""
    config.addinivalue_line("markers", MARKER)
    option = config.option
    if option.help or option.collectonly or option.markers or option.showfixtures:
        return
    settings = config.stash[_SETTINGS] = Settings.of(config)
    if settings.enabled:
        config.pluginmanager.register(_Gather(), "ampcheck-gather")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(_Report(settings), "ampcheck-report")


# Marker and fixture ----------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, trylast=True)  # the innermost wrapper: it observes the test and no other plugin
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the body of a marked test under observation."""
    __tracebackhide__ = True
    marker = item.get_closest_marker("ampcheck")
    if marker is None:
        return (yield)
    from ampcheck.audit import observe

    raised: BaseException | None = None
    try:
        with observe(_parse_marker(marker), item.nodeid):
            try:
                return (yield)
            except BaseException as error:
                raised = error
                raise
    except (AssertionError, UsageError) as error:
        if error is raised:
            raise
        raise error.with_traceback(None) from None  # the observation's own: its message says where, its frames do not


def _parse_marker(marker: pytest.Mark) -> tuple[str, ...]:
    __tracebackhide__ = True
    wrong = [repr(name) for name in marker.args if not isinstance(name, str)]
    wrong += [f"{key}={value!r}" for key, value in marker.kwargs.items()]
    if wrong:
        raise UsageError(f"the marker ampcheck takes names of checks, such as 'overflow', not {', '.join(wrong)}")
    return tuple(dict.fromkeys(marker.args))


@pytest.fixture(scope="session")
def ampcheck_device(pytestconfig: pytest.Config) -> str:
    """The device to test on, from `--ampcheck-device` or the ini file's `ampcheck_device`; `cpu` by default.

    Raises `ampcheck.UsageError` where this machine does not have it.
    """
    device = pytestconfig.stash[_SETTINGS].device
    if device != "cpu":
        _require_device(device)
    return device


def _require_device(device: str) -> None:
    import torch

    kind, _, index = device.partition(":")
    backend: Any = torch.backends.mps if kind == "mps" else getattr(torch, kind)
    if not backend.is_available():
        raise UsageError(f"--ampcheck-device={device}: PyTorch {torch.__version__} finds no such device here, use cpu")
    if index and int(index) >= (count := backend.device_count()):
        raise UsageError(f"--ampcheck-device={device}: this machine has {count} of them, the first is {kind}:0")


# Gathering: where tests run --------------------------------------------------------------------------------------

_ATTRIBUTE = "_ampcheck"
"""The attribute of a test report that carries what was gathered, through xdist too."""


@dataclass
class _Gathered:
    """What one test emitted, as JSON, and how it ended."""

    runs: list[str] = field(default_factory=list)
    outcome: str = "passed"


_GATHERED = pytest.StashKey[_Gathered]()


class _Gather:
    """Gathers what each test emits and hands it over with the report of its teardown."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        item.stash[_GATHERED] = _Gathered()  # anew for each attempt of a test that is run again
        with _gather_from(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        with _gather_from(item):
            return (yield)

    pytest_runtest_teardown = pytest_runtest_call

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        gathered = item.stash.setdefault(_GATHERED, _Gathered())
        gathered.outcome = _outcome(gathered.outcome, report)
        if report.when == "teardown" and gathered.runs:
            setattr(report, _ATTRIBUTE, asdict(gathered))
        return report


@contextmanager
def _gather_from(item: pytest.Item) -> Iterator[None]:
    __tracebackhide__ = True
    from ampcheck.record import collect

    with collect() as runs:
        try:
            yield
        finally:
            item.stash.setdefault(_GATHERED, _Gathered()).runs.extend(_to_text(run) for run in _told(item, runs))


def _told(item: pytest.Item, runs: list[Run]) -> list[Run]:
    """The runs to tell of. Hypothesis fails many examples on its way to the smallest, the last: it alone is told."""
    if not getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        return runs
    last = {frozenset(finding.check for finding in run.findings if finding.verdict == "fail"): run for run in runs}
    return [run for run in runs if not run.failed or any(run is one for one in last.values())]


def _to_text(run: Run) -> str:
    """The run as ASCII, which crosses every border: odd text, large integers and numbers of numpy included."""
    import json

    try:
        return json.dumps(run.to_json(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a run that is emitted must hold plain Python data, this one does not: {error}") from error


def _outcome(before: str, report: pytest.TestReport) -> str:
    """How the test stands after this phase: a failure stays, a phase that passed changes nothing."""
    now: str = report.outcome
    if hasattr(report, "wasxfail"):
        now = "xfailed" if now == "skipped" else "xpassed"
    return before if now == "passed" or before == "failed" else now


# Reporting: the process that owns the terminal -------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """What one test handed over. `order` is the same however the tests were spread over workers."""

    nodeid: str
    worker: str
    outcome: str
    run: Run

    @classmethod
    def of(cls, report: pytest.TestReport, data: dict[str, Any]) -> _Entry:
        import json

        from ampcheck.record import Run, merge

        run = merge(Run.from_json(json.loads(text)) for text in data["runs"])
        return cls(report.nodeid, getattr(report, "worker_id", ""), data["outcome"], run)

    def order(self) -> tuple[str, str]:
        return self.nodeid, self.worker

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.run.counts().items())
        return f"{self.nodeid} ({self.outcome}): {counts or 'no finding'}"


_FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""How a session ends that got past collection and was not broken off."""


class _Report:
    """Merges what the tests handed over, writes the files and prints header and summary."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.entries: list[_Entry] = []

    def pytest_report_header(self) -> str:
        return f"ampcheck: {_version('ampcheck')}, torch {_version('torch')}, device {self.settings.device}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = getattr(report, _ATTRIBUTE, None)
        if data is not None:
            self.entries.append(_Entry.of(report, data))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.session = session
        if session.config.getoption("no_summary", True):  # pytest 8 calls no summary then; the files are written anyway
            list(self._write(self._run()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if config.option.no_summary:
            return
        run = self._run()
        terminalreporter.ensure_newline()
        terminalreporter.section("ampcheck")
        for line in (*_summary(run, config.get_terminal_writer().fullwidth), *self._failed(), *self._write(run)):
            terminalreporter.write_line(line)

    def _run(self) -> Run:
        return _session_run(sorted(self.entries, key=_Entry.order), self.session.config.rootpath.name)

    def _failed(self) -> Iterator[str]:
        """Where the failures were: the tests' outcome tells whether they were expected."""
        return (f"in {entry}" for entry in sorted(self.entries, key=_Entry.order) if entry.run.failed)

    def _write(self, run: Run) -> Iterator[str]:
        """Write the files that were asked for; one line about each. A file that cannot be written fails the session."""
        for path, write in ((self.settings.html, _write_html), (self.settings.json, type(run).save)):
            if path is not None and (self.entries or self.session.exitstatus in _FINISHED):
                yield self._attempt(run, path, write)
            elif path is not None:
                yield f"no test ran, {path} was not written"

    def _attempt(self, run: Run, path: Path, write: Callable[[Run, Path], None]) -> str:
        try:
            write(run, path)
        except UsageError as error:
            self.session.exitstatus = self.session.exitstatus or pytest.ExitCode.TESTS_FAILED
            return str(error)
        return f"wrote {path}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _summary(run: Run, width: int) -> Iterator[str]:
    from ampcheck.report.terminal import summary_lines

    yield from summary_lines(run, width=width)
    if not run.findings:
        yield "hint: call one of ampcheck's asserts in a test, or mark the test with @pytest.mark.ampcheck"


def _write_html(run: Run, path: Path) -> None:
    from ampcheck.report.html import write_html

    write_html(run, path)


def _session_run(entries: list[_Entry], name: str) -> Run:
    """All of the tests' runs as one, with a table of the tests."""
    from ampcheck.record import Run, merge

    title = f"pytest of {name}"
    if not entries:
        return Run(title=title)
    merged = merge(_signed(entry) for entry in entries)
    return replace(merged, title=title, tables=(_table_of_tests(entries), *merged.tables))


def _signed(entry: _Entry) -> Run:
    """The test's run, with the test named in the note of each table and chart."""
    sign = f" Test: {entry.nodeid}"
    tables = tuple(replace(table, note=(table.note + sign).lstrip()) for table in entry.run.tables)
    charts = tuple(replace(chart, note=(chart.note + sign).lstrip()) for chart in entry.run.charts)
    return replace(entry.run, tables=tables, charts=charts)


def _table_of_tests(entries: list[_Entry]) -> Table:
    from ampcheck.record import SEVERITY, Table

    rows: list[list[str | int]] = []
    for entry in entries:
        counts = entry.run.counts()
        subjects = ", ".join(dict.fromkeys(finding.subject for finding in entry.run.findings))
        verdicts = [counts.get(verdict, 0) for verdict in SEVERITY]
        rows.append([entry.nodeid, entry.outcome, subjects, entry.run.coverage.total, *verdicts])
    columns = ("test", "outcome", "subject", "looked at", *map(str, SEVERITY))
    return Table("Tests", columns, rows, note="Findings of each test, by verdict.")
