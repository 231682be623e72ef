"""A small suite whose tests emit findings, and ways to run it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

SAMPLE = '''
"""Runs, as the asserts of ampcheck make them."""
from ampcheck.core.run import Chart, Coverage, Finding, Run, Series, Table, Verdict
from ampcheck.outcome.raising import verify

def a_run(verdict, ops=1, subject="Tiny", observed=None, message="an output stays finite"):
    finding = Finding("overflow", Verdict(verdict), subject, message, observed=observed, hint="scale it")
    chart = Chart("line", "Loss", "step", series=(Series("loss", (0.0, 1.0), (2.0, 1.0)),))
    table = Table("Ops", ("op", "count"), [("aten::mm", ops)], note="Counted.")
    return Run({"torch": "2.0"}, (finding,), Coverage({"ops": ops}), (table,), (chart,))

def judge(*arguments, **keywords):
    return verify(a_run(*arguments, **keywords))
'''

SUITE = """
import pytest
from sample import judge

@pytest.mark.parametrize("ops", [1, 2, 3])
def test_well(ops):
    judge("pass", ops)

def test_two():
    judge("pass", 10, "first")
    judge("warn", 20, "second")

def test_overflows():
    judge("fail", 4, "Big", float("inf"))

@pytest.mark.xfail(strict=True)
def test_known():
    judge("fail", 5, "Known")

def test_without():
    pass
"""


def lines_of_source(result: pytest.RunResult) -> list[str]:
    """The places that tracebacks show."""
    return [line for line in result.outlines if re.match(r"\S+\.py:\d+: ", line)]


@pytest.fixture(autouse=True)
def outside_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests run must not take itself for a worker where this suite is spread over some."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sample(pytester: pytest.Pytester) -> pytest.Pytester:
    """A pytester whose tests can `from sample import judge`."""
    pytester.makepyfile(sample=SAMPLE)
    return pytester


@pytest.fixture
def suite(sample: pytest.Pytester) -> pytest.Pytester:
    """A suite of eight tests: passes, a warning, a failure, an expected failure, one that emits nothing."""
    sample.makepyfile(test_suite=SUITE)
    return sample


@pytest.fixture(params=["-n0", "-n2"])
def spread(request: pytest.FixtureRequest) -> str:
    """The option that runs the tests in one process, and in two workers of xdist."""
    option: str = request.param
    return option


Section = Callable[[pytest.RunResult], list[str]]


@pytest.fixture
def section() -> Section:
    """Takes the lines of ampcheck's section out of a result."""

    def lines_of(result: pytest.RunResult) -> list[str]:
        lines = result.outlines
        start = next(i for i, line in enumerate(lines) if line.startswith("=") and line.strip("=") == " ampcheck ")
        end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith("="))
        return lines[start + 1 : end]

    return lines_of
