"""The findings of all tests: collected where tests run, reported by the process that owns the terminal.

Runs that a test emits (`ampcheck.core.run.emit`) are collected around its phases, travel as plain data on the report of
its teardown, and are merged in the order of node ids, so `-n 2` reports what `-n 0` reports. A fixture with a wider
scope runs once in each worker of xdist, and its runs count as often.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ampcheck.core.environment import installed
from ampcheck.core.errors import SHOWS, UsageError
from ampcheck.core.run import SEVERITY, Run, Table, Verdict, collect, merge
from ampcheck.core.source import fingerprint_of, repository_of
from ampcheck.core.text import clean, counted
from ampcheck.core.updating import updating
from ampcheck.plugin.by_cause import by_cause
from ampcheck.plugin.settings import Options

# Collecting: where tests run -----------------------------------------------------------------------------------------

_ATTRIBUTE = "_ampcheck"
"""The attribute of a test report that carries the collected data, through xdist too."""


@dataclass
class _Collected:
    """The runs of one test as JSON, the entries of locks that it wrote, its outcome, and whether its failure shows the
    findings."""

    runs: list[str] = field(default_factory=list)
    written: list[tuple[str, str]] = field(default_factory=list)
    outcome: str = "passed"
    shown: bool = False


_COLLECTED = pytest.StashKey[_Collected]()


class Collector:
    """Collects the runs that each test emits and adds them to the report of its teardown, with their properties.

    update: policy locks are written instead of compared. root: to which the places of findings are relative.
    """

    def __init__(self, update: bool, root: Path) -> None:
        self.update = update
        self.root = root

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Collect the runs of fixtures."""
        __tracebackhide__ = True
        item.stash[_COLLECTED] = _Collected()  # empty again for each attempt of a test that is rerun
        with _collect_from(item, self.update):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Collect the runs of the test."""
        __tracebackhide__ = True
        with _collect_from(item, self.update):
            return (yield)

    pytest_runtest_teardown = pytest_runtest_call

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the collected data to the report."""
        report = yield
        collected = item.stash.setdefault(_COLLECTED, _Collected())
        collected.shown |= call.excinfo is not None and hasattr(call.excinfo.value, SHOWS)
        collected.outcome = _outcome(collected.outcome, report)
        if report.when == "teardown" and (collected.runs or collected.written):
            setattr(report, _ATTRIBUTE, asdict(collected))
            report.user_properties += _properties(collected, self.root)
        return report


@contextmanager
def _collect_from(item: pytest.Item, update: bool) -> Iterator[None]:
    __tracebackhide__ = True

    written: list[tuple[str, str]] = []
    with ExitStack() as stack, collect() as runs:
        if update:
            written = stack.enter_context(updating())
        try:
            yield
        finally:
            collected = item.stash.setdefault(_COLLECTED, _Collected())
            collected.runs.extend(map(_to_text, _reported(item, runs)))
            collected.written.extend(written)


def _reported(item: pytest.Item, runs: list[Run]) -> list[Run]:
    """The runs without those of examples that Hypothesis has shrunk: of equal failures only the last is reported."""
    if not getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        return runs
    last = {frozenset(finding.check for finding in run.findings if finding.verdict == "fail"): run for run in runs}
    return [run for run in runs if not run.failed or any(run is smallest for smallest in last.values())]


def _to_text(run: Run) -> str:
    """The run as ASCII. Raises `UsageError`, in the test that emits it, for a run that cannot be read back or drawn."""
    try:
        data = run.to_json()
        text = json.dumps(data, allow_nan=False)
        type(run).from_json(data)
        return text
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"an emitted run must contain only plain Python data, and this one does not: {error}"
        ) from error


def _properties(collected: _Collected, root: Path) -> Iterator[tuple[str, object]]:
    """The findings of a test as properties, which JUnit XML shows: `ampcheck.fail` and the other verdicts with their
    counts; check, place and fingerprint of the first failure."""
    run = _merged(collected.runs)
    yield from ((f"ampcheck.{verdict}", count) for verdict, count in run.counts().items())
    failures = sorted(run.of(Verdict.FAIL), key=lambda finding: bool(finding.cause))  # causes first
    for finding in failures[:1]:
        yield "ampcheck.check", clean(finding.check)
        yield "ampcheck.where", clean(str(finding.where))
        yield "ampcheck.fingerprint", fingerprint_of(finding, repository_of(root))


def _merged(texts: Iterable[str]) -> Run:
    """Runs that travelled as JSON, as one."""
    return merge(Run.from_json(json.loads(text)) for text in texts)


def _outcome(before: str, report: pytest.TestReport) -> str:
    """The outcome of the test after this phase: failures stay, passed phases change nothing."""
    now: str = report.outcome
    if hasattr(report, "wasxfail"):
        now = "xfailed" if now == "skipped" else "xpassed"
    return before if now == "passed" or before == "failed" else now


# Reporting: the process that owns the terminal -----------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class _Entry:
    """The data of one test. The order is the same however the tests are distributed over workers."""

    nodeid: str
    worker: str
    outcome: str = field(compare=False)
    run: Run = field(compare=False)
    written: tuple[tuple[str, str], ...] = field(compare=False, default=())
    shown: bool = field(compare=False, default=False)

    @classmethod
    def of(cls, report: pytest.TestReport, data: dict[str, Any]) -> _Entry:
        written = tuple((path, name) for path, name in data["written"])
        worker = getattr(report, "worker_id", "")
        shown = data["shown"] and data["outcome"] == "failed"
        return cls(report.nodeid, worker, data["outcome"], _merged(data["runs"]), written, shown)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.run.counts().items())
        return f"{self.nodeid} ({self.outcome}): {counts or 'no finding'}"


_FEW = 3
"""So many tests with failures, and reasons of skipped tests, are named below the summary."""

_FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""Exit codes of a session that was collected and not interrupted."""


class Report:
    """Merges the data of the tests, writes the files and prints header and summary. notes: lines below the summary."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.entries: list[_Entry] = []
        self.skips = Counter[str]()
        self.notes: list[str] = []

    def add(self, run: Run, test: str = "(session)") -> None:
        """Add findings that no result of a test shows: those of the watch of a test, or of the session."""
        self.entries.append(_Entry(test, "", "passed", run))

    def pytest_report_header(self) -> str:
        """One line on the versions and the device."""
        versions = [installed(name) or "not installed" for name in ("ampcheck", "torch")]
        return f"ampcheck: {versions[0]}, torch {versions[1]}, device {self.options.device}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the data of a test, and why it was skipped."""
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            self.skips[report.longrepr[2].removeprefix("Skipped: ")] += 1
        data = getattr(report, _ATTRIBUTE, None)
        if data is not None:
            self.entries.append(_Entry.of(report, data))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the files if no summary will be printed."""
        self.session = session
        if session.config.getoption("no_summary", True):  # pytest 8 then calls no summary
            list(self._write(self._run()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Print the summary and write the files."""
        if config.option.no_summary:
            return
        run = self._run()
        written = list(self._write(run))  # first, as the terminal may be full or closed
        terminalreporter.ensure_newline()
        terminalreporter.section("ampcheck")
        from ampcheck.report.fitting import LIMIT
        from ampcheck.report.github import annotations_in_job
        from ampcheck.report.terminal import summary_lines

        width, verbose = config.get_terminal_writer().fullwidth, config.option.verbose > 1
        failed = [*self._failing(None if verbose else _FEW), *self._skips(None if verbose else _FEW)]
        limit, more = LIMIT - len(failed), "-vv or --ampcheck-html=PATH shows all"
        in_traceback = [
            entry.run for entry in self.entries if entry.shown and config.option.tbstyle not in ("no", "line")
        ]
        shown = {finding.key for shown in in_traceback for finding in shown.findings}
        summary = list(summary_lines(run, width=width, verbose=verbose, limit=limit, more=more, shown=shown))
        if not run.findings:
            hint = "call one of ampcheck's asserts in a test, or mark the test with @pytest.mark.ampcheck"
            if not any(terminalreporter.stats.get(how) for how in ("passed", "failed", "skipped", "error", "xfailed")):
                hint = "no test ran: -k, -m or the paths selected none"
            summary.append(f"hint: {hint}")
        annotations = annotations_in_job(self._unexpected(run), config.rootpath)
        lines = map(clean, (*summary, *failed, *self._locks(), *self.notes, *written))
        for line in (*lines, *annotations):  # which are commands to GitHub Actions, and clean
            terminalreporter.write_line(line)

    def _run(self) -> Run:
        """The runs of all tests as one, with a table of the tests."""
        title, entries = f"pytest of {self.session.config.rootpath.name}", sorted(self.entries)
        if self.session.exitstatus == pytest.ExitCode.INTERRUPTED:
            title += ", interrupted"
        if not entries:
            return Run(title=title)
        merged = merge(map(_with_test_name, entries))
        findings = by_cause(merged.findings, self.session.config.rootpath)
        return replace(merged, title=title, findings=findings, tables=(_table_of_tests(entries), *merged.tables))

    def _unexpected(self, run: Run) -> Run:
        """The run without the findings of tests that are expected to fail."""
        kept = [entry for entry in sorted(self.entries) if entry.outcome != "xfailed"]
        findings = (finding for entry in kept for finding in entry.run.findings)
        return replace(run, findings=by_cause(findings, self.session.config.rootpath))

    def _failing(self, limit: int | None) -> Iterator[str]:
        """The tests with failures, at most `limit` of them, and how many more there are."""
        entries = [entry for entry in sorted(self.entries) if entry.run.failed]
        yield from (f"in {entry}" for entry in entries[:limit])
        if more := len(entries) - len(entries[:limit]):
            yield f"in {counted(more, 'more tests')}"

    def _skips(self, limit: int | None) -> Iterator[str]:
        """The reasons of skipped tests, at most `limit` of them, and how many more tests were skipped."""
        reasons = sorted(self.skips.items(), key=lambda item: (-item[1], item[0]))
        yield from (
            f"{counted(count, 'tests')} skipped: {' '.join(reason.split())}" for reason, count in reasons[:limit]
        )
        if limit is not None and (more := sum(count for _, count in reasons[limit:])):
            yield f"{counted(more, 'more tests')} skipped; -rs shows why"

    def _locks(self) -> Iterator[str]:
        """The written locks, with their entries."""
        written = [pair for entry in sorted(self.entries) for pair in entry.written]
        for path in dict.fromkeys(path for path, _ in written):
            yield f"updated {path}: {', '.join(dict.fromkeys(name for p, name in written if p == path))}"
        if self.options.update and not written:
            yield (
                "--ampcheck-update: nothing was written; no test reached ampcheck.assert_policy, a body under "
                "@pytest.mark.ampcheck(lock=True) or golden.check"
            )

    def _write(self, run: Run) -> Iterator[str]:
        """Write the requested files; one line about each. A file that cannot be written fails the session."""
        from ampcheck.checks import REGISTRY
        from ampcheck.report.outputs import write_outputs

        files, folder = self.options.files, self.session.config.rootpath
        if not self.entries and self.session.exitstatus not in _FINISHED:
            yield from (f"no test ran, {path} was not written" for path in files.values())
            return
        written, errors = write_outputs(run, files, kind="pytest", rules=REGISTRY, folder=folder)
        if errors:
            self.session.exitstatus = self.session.exitstatus or pytest.ExitCode.TESTS_FAILED
        yield from (f"wrote {files[name]}" for name in written)
        yield from map(str, errors)


def _with_test_name(entry: _Entry) -> Run:
    """The test's run, with the test's name in the note of each table, chart and map."""
    name = f" Test: {entry.nodeid}"
    tables = tuple(replace(table, note=(table.note + name).lstrip()) for table in entry.run.tables)
    charts = tuple(replace(chart, note=(chart.note + name).lstrip()) for chart in entry.run.charts)
    maps = tuple(replace(model_map, note=(model_map.note + name).lstrip()) for model_map in entry.run.maps)
    return replace(entry.run, tables=tables, charts=charts, maps=maps)


def _table_of_tests(entries: list[_Entry]) -> Table:
    rows: list[list[str | int]] = []
    for entry in entries:
        counts = entry.run.counts()
        subjects = ", ".join(dict.fromkeys(finding.subject for finding in entry.run.findings))
        verdicts = [counts.get(verdict, 0) for verdict in SEVERITY]
        rows.append([entry.nodeid, entry.outcome, subjects, entry.run.coverage.total, *verdicts])
    columns = ("test", "outcome", "subject", "looked at", *map(str, SEVERITY))
    return Table("Tests", columns, rows, note="Findings of each test, by verdict.")
