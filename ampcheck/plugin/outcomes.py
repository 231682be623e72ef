"""Outcome of a suite under `--ampcheck-watch`: its cost, its tests by how they ended, and the lines about them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

from ampcheck.core.errors import brief
from ampcheck.core.run import Finding, Run, Verdict, Where
from ampcheck.core.text import counted
from ampcheck.plugin.comparisons import is_compared

_CREDIT = 30.0
"""Seconds that the watch of a suite may take beyond its budget: entering a watch alone costs some hundredths."""

_OF_DTYPES, _OF_COMPARISONS = "policy-unregistered", ("precision-loss", "policy-unregistered")
"""Checks that fail by operands of two dtypes, and by two results that a test compares."""

_NAMED = 10
"""So many tests of a kind are named below the summary; `-vv` names all."""


@dataclass
class Outcomes:
    """Tests that a process of the session has watched, as it travels to the one that owns the terminal.

    start: seconds to import what a watch needs and to probe policies, which no budget counts. runs: test to its run, as
    JSON. own: tests that fail under AMP by themselves, with the error. ended: those whose watch was ended by the
    budget; left_out: those that it left out; both with their own seconds. unlike: tests that do not pass a second time
    as they are. failing: those that fail as they are.
    """

    tests: float = 0.0
    watches: float = 0.0
    start: float = 0.0
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, float] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)

    def limit(self, seconds: float, factor: float) -> float:
        """Enter the time of a test. The seconds that its watch may take: its own share, and half of the rest.

        factor: how many times as long as the tests all watches together may take, beyond a credit.
        """
        self.tests += seconds
        share, left = factor * seconds, factor * self.tests + _CREDIT - self.watches
        return left if left < share else share + (left - share) / 2

    def add(self, other: Outcomes) -> None:
        """Add those of another process."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, {**mine, **value} if isinstance(mine, dict) else mine + value)


def shortened(error: BaseException | None) -> str:
    """An error in a line."""
    return "an error" if error is None else brief(error).splitlines()[0]


def of_tests(path: str) -> bool:
    """Return whether a file lies in a folder of tests or of their helpers."""
    return not {"test", "tests", "testing"}.isdisjoint(path.replace("\\", "/").split("/")[:-1])


def place_in_library(error: BaseException | None) -> Where | None:
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
    return None if is_rewritten or of_tests(path) else Where("forward", file=short_path(path), line=line)


def notes(outcomes: Outcomes, label: str, *, verbose: bool) -> Iterator[str]:
    """Yield what the summary says about the session beside its findings."""
    watched = len(outcomes.runs)
    total = (outcomes.tests + outcomes.watches) / outcomes.tests if outcomes.tests else 1.0
    yield (
        f"watched {counted(watched, 'tests')} {label}: {outcomes.watches:.1f} s beside {outcomes.tests:.1f} s of the "
        f"tests themselves, {total:.1f}x in all, and {outcomes.start:.1f} s to start"
    )
    limit, own = None if verbose else _NAMED, sorted(outcomes.own.items())
    kinds = {
        "not watched, since it fails without AMP, too": dict(sorted(outcomes.failing.items())),
        f"fails {label}: its own assertion": {name: why for name, why in own if why.startswith("AssertionError")},
        f"fails {label}: the test itself raises": {n: why for n, why in own if not why.startswith("AssertionError")},
        "not judged, as it does not pass a second time": dict(sorted(outcomes.unlike.items())),
        "watched in part, the budget ended it (--ampcheck-budget)": _seconds(outcomes.ended),
        "not watched, beyond the budget (--ampcheck-budget)": _seconds(outcomes.left_out),
    }
    for text, tests in kinds.items():
        yield from (f"{text}: {name}" + f" ({why})" * bool(why) for name, why in list(tests.items())[:limit])
        if more := len(tests) - len(list(tests)[:limit]):
            yield f"{text}: {counted(more, 'more tests')}; -vv names them"


def _seconds(tests: dict[str, float]) -> dict[str, str]:
    """Tests with their own time, the slowest first."""
    return {name: f"{tests[name]:.1f} s" for name in sorted(tests, key=lambda name: -tests[name])}


def lacks_evidence(finding: Finding) -> bool:
    """Return whether a finding says that nothing was looked at, as where a test ends before it runs an op."""
    return finding.check == "coverage" and finding.verdict is Verdict.FAIL


def silent(run: Run, item: pytest.Item) -> Run:
    """The run without skips, without `coverage` for a test in which nothing floats, and without the digits and the
    dtypes that the test's own comparisons of two results lose."""
    from ampcheck.torchtools.source import short_path

    def says_something(finding: Finding) -> bool:
        where, lacks = finding.where, finding.check == "coverage" and finding.verdict is not Verdict.PASS
        if finding.check in _OF_COMPARISONS and where.line and where.file == short_path(str(item.path)):
            return not is_compared(item.path, where.line)
        if finding.check == _OF_DTYPES and of_tests(where.file):  # a helper that compares, such as allclose
            return False
        return finding.verdict is not Verdict.SKIP and (not lacks or bool(run.coverage.unseen))

    return replace(run, findings=tuple(filter(says_something, run.findings)))


def without_eager_note(run: Run) -> Run:
    """The run without the note that compiled functions ran in eager mode: they also ran compiled."""
    unseen = {why: count for why, count in run.coverage.unseen.items() if "compiled functions" not in why}
    kept = tuple(f for f in run.findings if f.check != "coverage" or unseen or f.verdict is Verdict.PASS)
    return replace(run, findings=kept, coverage=replace(run.coverage, unseen=unseen))
