"""`@pytest.mark.ampcheck(...)`: the body runs under observation and the findings fail the test.

The observation is a stand-in that fails for each check that the body names through `happens`; the last tests use the
real one.
"""

from __future__ import annotations

import pytest
from plugin_suite import Section

from ampcheck import Run

STAND_IN = """
import sys
import types

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Coverage, Finding, Run, Verdict, emit
from ampcheck.outcome.raising import verify

VALID = ("overflow", "flush", "integer-cast")
seen = []

class watch:
    def __init__(self, checks, name):
        assert isinstance(checks, tuple)
        self.asked = checks, name

    def __enter__(self):
        __tracebackhide__ = True
        if wrong := set(self.asked[0]) - set(VALID):
            raise UsageError(f"unknown check {wrong.pop()}: choose of {', '.join(VALID)}")
        seen.clear()

    def __exit__(self, error, *rest):
        __tracebackhide__ = True
        emit(run(*self.asked)) if error else verify(run(*self.asked))

def run(checks, subject):
    verdicts = {check: Verdict.FAIL if check in seen else Verdict.PASS for check in checks or VALID}
    findings = tuple(Finding(check, verdict, subject, "must not be") for check, verdict in verdicts.items())
    return Run(findings=findings, coverage=Coverage({"ops": 3}))

sys.modules["ampcheck.watch"] = types.SimpleNamespace(watch=watch)
sys.modules["ampcheck.watch_families"] = types.SimpleNamespace(OP_CHECKS=VALID)
sys.modules["happens"] = types.SimpleNamespace(happens=seen.append)
"""

BEGIN = "import pytest\nfrom happens import happens\n\n"


@pytest.fixture
def observed(pytester: pytest.Pytester) -> pytest.Pytester:
    """A pytester in which the stand-in observes."""
    pytester.makeconftest(STAND_IN)
    pytester.makeini("[pytest]\naddopts = --strict-markers\n")
    return pytester


def test_a_finding_of_a_named_check_fails_the_test(observed: pytest.Pytester, spread: str) -> None:
    observed.makepyfile(
        BEGIN
        + """
@pytest.mark.ampcheck("overflow", "flush")
def test_it():
    happens("flush")

@pytest.mark.ampcheck("overflow")
def test_other():
    happens("flush")
"""
    )
    result = observed.runpytest(spread)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E *AssertionError: [[]flush[]] fail: *::test_it: must not be"])
    result.stdout.no_fnmatch_line("*plugin*plugin.py*")


def test_without_names_every_check_is_judged(observed: pytest.Pytester) -> None:
    observed.makepyfile(
        BEGIN
        + """
@pytest.mark.ampcheck
def test_bare():
    happens("integer-cast")

@pytest.mark.ampcheck()
def test_called():
    happens("flush")
"""
    )
    observed.runpytest("-n0").assert_outcomes(failed=2)


def test_an_unmarked_test_is_not_observed(observed: pytest.Pytester) -> None:
    observed.makepyfile(BEGIN + "def test_it(): happens('overflow')")
    observed.runpytest("-n0").assert_outcomes(passed=1)


def test_with_defaults_of_speed_alone_nothing_is_observed(observed: pytest.Pytester) -> None:
    observed.makepyfile(
        BEGIN
        + """
pytestmark = pytest.mark.ampcheck(speed={"budget": 1})

def test_it(): happens("overflow")
"""
    )
    observed.runpytest("-n0").assert_outcomes(passed=1)


def test_only_the_body_is_observed(observed: pytest.Pytester) -> None:
    observed.makepyfile(
        BEGIN
        + """
@pytest.fixture
def around():
    happens("overflow")
    yield
    happens("overflow")

@pytest.mark.ampcheck
def test_it(around): pass
"""
    )
    observed.runpytest("-n0").assert_outcomes(passed=1)


def test_a_strict_xfail_expects_the_finding(observed: pytest.Pytester, spread: str) -> None:
    observed.makepyfile(
        BEGIN
        + """
@pytest.mark.xfail(strict=True, raises=AssertionError)
@pytest.mark.ampcheck("overflow")
def test_known(): happens("overflow")

@pytest.mark.xfail(strict=True)
@pytest.mark.ampcheck("overflow")
def test_mended(): pass
"""
    )
    result = observed.runpytest(spread)
    result.assert_outcomes(xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["[[]XPASS(strict)[]]*", "FAILED *::test_mended*"])


def test_the_findings_reach_the_summary(observed: pytest.Pytester, spread: str, section: Section) -> None:
    observed.makepyfile(
        test_marked=BEGIN
        + """
@pytest.mark.ampcheck("overflow", "flush")
def test_well(): pass

@pytest.mark.ampcheck("overflow")
def test_raises():
    happens("overflow")
    raise RuntimeError("the body's own")
"""
    )
    result = observed.runpytest(spread, "--ampcheck", "--ampcheck-json=run.json")
    result.stdout.fnmatch_lines(["E *RuntimeError: the body's own"])
    assert "in test_marked.py::test_raises (failed): 1 fail" in section(result)
    run = Run.load(observed.path / "run.json")
    assert [(finding.check, finding.subject, str(finding.verdict)) for finding in run.findings] == [
        ("overflow", "test_marked.py::test_raises", "fail"),
        ("overflow", "test_marked.py::test_well", "pass"),
        ("flush", "test_marked.py::test_well", "pass"),
    ]


def test_the_closest_marker_counts(observed: pytest.Pytester) -> None:
    observed.makepyfile(
        BEGIN
        + """
pytestmark = pytest.mark.ampcheck

@pytest.mark.ampcheck("flush")
class TestIt:
    def test_of_the_class(self): happens("overflow")

    @pytest.mark.ampcheck("overflow", "overflow")
    def test_of_its_own(self): happens("overflow")

def test_of_the_module(): happens("overflow")
"""
    )
    result = observed.runpytest("-n0")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["FAILED *::TestIt::test_of_its_own*", "FAILED *::test_of_the_module*"])


TAKES = (
    "the marker ampcheck takes names of checks, such as 'overflow', lock=True or a path, device='cuda', "
    "and speed={'at_least': 1.2}"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("3", f"{TAKES}, not 3"),
        ("['overflow'], 'flush'", f"{TAKES}, not ['overflow']"),
        ("limit=1", f"{TAKES}, not limit=1"),
        ("lock=1", f"{TAKES}, not lock=1"),
        ("'overflow', device=0", f"{TAKES}, not device=0"),
        ("speed=1.2", f"{TAKES}, not speed=1.2"),
        ("'underflow'", "unknown check underflow: choose of overflow, flush, integer-cast"),
    ],
)
def test_wrong_arguments_fail_that_test(observed: pytest.Pytester, arguments: str, message: str) -> None:
    observed.makepyfile(
        BEGIN
        + f"""
@pytest.mark.ampcheck({arguments})
def test_wrong(): pass

@pytest.mark.ampcheck("overflow")
def test_right(): pass
"""
    )
    result = observed.runpytest("-n0")
    result.assert_outcomes(passed=1, failed=1)
    assert f"E   ampcheck.core.errors.UsageError: {message}" in result.outlines
    result.stdout.no_fnmatch_line("*plugin*plugin.py*")


def test_other_wrappers_are_not_observed(observed: pytest.Pytester) -> None:
    """The observation is innermost: what another plugin does around the test is not the test's."""
    observed.makeconftest(
        STAND_IN
        + """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    outcome = yield
    seen.append("overflow")
    return outcome
"""
    )
    observed.makepyfile(BEGIN + "@pytest.mark.ampcheck\ndef test_it(): pass")
    observed.runpytest("-n0").assert_outcomes(passed=1)


def test_the_marker_is_listed(pytester: pytest.Pytester) -> None:
    pytester.runpytest("--markers").stdout.fnmatch_lines(["@pytest.mark.ampcheck([*]checks, lock=*): observe the *"])


REAL = """
import pytest
import torch

def large():
    return torch.full((4,), 6e4, dtype=torch.float16)

@pytest.mark.ampcheck("overflow")
def test_overflows():
    large() + large()

@pytest.mark.ampcheck("overflow")
def test_well():
    large() - large()

@pytest.mark.xfail(strict=True, raises=AssertionError)
@pytest.mark.ampcheck
def test_known():
    large() + large()

@pytest.mark.ampcheck
def test_own():
    assert torch.ones(3).sum() == 4

@pytest.mark.ampcheck("underflow")
def test_unknown():
    pass
"""


@pytest.mark.usefixtures("warm_processes")
def test_the_real_observation(pytester: pytest.Pytester, spread: str) -> None:
    pytester.makepyfile(test_real=REAL)
    result = pytester.runpytest_subprocess(spread, "--ampcheck-json=run.json")
    result.assert_outcomes(passed=1, failed=3, xfailed=1)
    for line in (  # two workers fail in either order
        "E *AssertionError: [[]overflow[]] fail: test_real.py::test_overflows: *",
        ">       assert torch.ones(3).sum() == 4",
        "E *UsageError: checks must be one of *; found 'underflow'*",
    ):
        result.stdout.fnmatch_lines([line])
    for file in ("plugin/plugin.py", "contextlib.py"):
        result.stdout.no_fnmatch_line(f"*{file}*")
    failed = [finding for finding in Run.load(pytester.path / "run.json").findings if str(finding.verdict) == "fail"]
    assert [(finding.check, finding.subject) for finding in failed] == [
        ("overflow", "test_real.py::test_known"),
        ("overflow", "test_real.py::test_overflows"),
    ]


def test_a_pair_that_a_marked_test_returns_is_compared(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch

        x = torch.arange(1.0, 9.0)

        @pytest.mark.ampcheck("parity")
        @pytest.mark.parametrize("factor", [2.0, 2.1])
        def test_doubled(factor):
            return lambda x: x + x, lambda x: x * factor, (x,)

        @pytest.mark.ampcheck("parity")
        def test_bits():
            return lambda x: (x + x).sqrt(), lambda x: (x * 2).sqrt(), (x,), {"relation": "bitwise"}

        @pytest.mark.ampcheck("parity")
        def test_nothing():
            pass
        """
    )
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*must compute one function*", "*returns (a, b), (a, b, args)*found None*"])
