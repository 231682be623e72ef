"""What tests found, gathered where they run, told by the process that owns the terminal: header, summary and files.

What a test emits (`ampcheck.core.run.emit`) is gathered around its phases, travels as plain data on the report of its
teardown, and is merged in the order of node ids, so `-n 2` says what `-n 0` says. A fixture wider than one test runs
once in each worker of xdist, and what it emits counts as often.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.core.text import clean

if TYPE_CHECKING:
    from ampcheck.core.run import Run, Table
    from ampcheck.plugin.plugin import Settings

# Gathering: where tests run --------------------------------------------------------------------------------------

_ATTRIBUTE = "_ampcheck"
"""The attribute of a test report that carries what was gathered, through xdist too."""


@dataclass
class _Gathered:
    """What one test emitted, as JSON, which entries of locks it wrote, and how it ended."""

    runs: list[str] = field(default_factory=list)
    written: list[tuple[str, str]] = field(default_factory=list)
    outcome: str = "passed"


_GATHERED = pytest.StashKey[_Gathered]()


class Gather:
    """Gathers what each test emits and hands it over with the report of its teardown.

    update: locks are written anew instead of compared.
    """

    def __init__(self, update: bool) -> None:
        self.update = update

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Gather what fixtures emit."""
        __tracebackhide__ = True
        item.stash[_GATHERED] = _Gathered()  # anew for each attempt of a test that is run again
        with _gather_from(item, self.update):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Gather what the test emits."""
        __tracebackhide__ = True
        with _gather_from(item, self.update):
            return (yield)

    pytest_runtest_teardown = pytest_runtest_call

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Hand over what was gathered."""
        report = yield
        gathered = item.stash.setdefault(_GATHERED, _Gathered())
        gathered.outcome = _outcome(gathered.outcome, report)
        if report.when == "teardown" and (gathered.runs or gathered.written):
            setattr(report, _ATTRIBUTE, asdict(gathered))
        return report


@contextmanager
def _gather_from(item: pytest.Item, update: bool) -> Iterator[None]:
    __tracebackhide__ = True
    from ampcheck.core.run import collect

    written: list[tuple[str, str]] = []
    with ExitStack() as open_, collect() as runs:
        if update:
            from ampcheck.autocast.locks.file import updating

            written = open_.enter_context(updating())
        try:
            yield
        finally:
            gathered = item.stash.setdefault(_GATHERED, _Gathered())
            gathered.runs.extend(_to_text(run) for run in _told(item, runs))
            gathered.written.extend(written)


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
        data = run.to_json()
        text = json.dumps(data, allow_nan=False)
        type(run).from_json(data)  # what cannot be read back or drawn fails its own test, and not the session
        return text
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
    written: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, report: pytest.TestReport, data: dict[str, Any]) -> _Entry:
        import json

        from ampcheck.core.run import Run, merge

        run = merge(Run.from_json(json.loads(text)) for text in data["runs"])
        written = tuple((path, name) for path, name in data["written"])
        return cls(report.nodeid, getattr(report, "worker_id", ""), data["outcome"], run, written)

    def order(self) -> tuple[str, str]:
        return self.nodeid, self.worker

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.run.counts().items())
        return f"{self.nodeid} ({self.outcome}): {counts or 'no finding'}"


_FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""How a session ends that got past collection and was not broken off."""


class Report:
    """Merges what the tests handed over, writes the files and prints header and summary."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.entries: list[_Entry] = []
        self.notes: list[str] = []

    def add(self, run: Run) -> None:
        """Take what was found when the tests were over, of no test in particular."""
        self.entries.append(_Entry("(session)", "", "passed", run))

    def note(self, line: str) -> None:
        """Take a line that is printed below the summary."""
        self.notes.append(line)

    def pytest_report_header(self) -> str:
        """One line on the versions and the device."""
        return f"ampcheck: {_version('ampcheck')}, torch {_version('torch')}, device {self.settings.device}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test handed over."""
        data = getattr(report, _ATTRIBUTE, None)
        if data is not None:
            self.entries.append(_Entry.of(report, data))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the files where no summary will be printed."""
        self.session = session
        if session.config.getoption("no_summary", True):  # pytest 8 calls no summary then; the files are written anyway
            list(self._write(self._run()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Print the summary and write the files."""
        if config.option.no_summary:
            return
        run = self._run()
        written = list(self._write(run))  # first, as the terminal may be full or closed
        terminalreporter.ensure_newline()
        terminalreporter.section("ampcheck")
        for line in (
            *_summary(run, config.get_terminal_writer().fullwidth),
            *self._failed(),
            *self._locks(),
            *self.notes,
            *written,
        ):
            terminalreporter.write_line(clean(line))

    def _run(self) -> Run:
        return _session_run(sorted(self.entries, key=_Entry.order), self.session.config.rootpath.name)

    def _failed(self) -> Iterator[str]:
        """Where the failures were: the tests' outcome tells whether they were expected."""
        return (f"in {entry}" for entry in sorted(self.entries, key=_Entry.order) if entry.run.failed)

    def _locks(self) -> Iterator[str]:
        """The locks that were written, with the entries."""
        written = [pair for entry in sorted(self.entries, key=_Entry.order) for pair in entry.written]
        for path in dict.fromkeys(path for path, _ in written):
            yield f"updated {path}: {', '.join(dict.fromkeys(name for p, name in written if p == path))}"
        if self.settings.update and not written:
            yield (
                "--ampcheck-update: nothing was written; no test came as far as writing a lock, by "
                "ampcheck.assert_policy or @pytest.mark.ampcheck(lock=True)"
            )

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
    from ampcheck.core.run import Run, merge

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
    from ampcheck.core.run import SEVERITY, Table

    rows: list[list[str | int]] = []
    for entry in entries:
        counts = entry.run.counts()
        subjects = ", ".join(dict.fromkeys(finding.subject for finding in entry.run.findings))
        verdicts = [counts.get(verdict, 0) for verdict in SEVERITY]
        rows.append([entry.nodeid, entry.outcome, subjects, entry.run.coverage.total, *verdicts])
    columns = ("test", "outcome", "subject", "looked at", *map(str, SEVERITY))
    return Table("Tests", columns, rows, note="Findings of each test, by verdict.")
