"""Installed and not used, the plugin costs nothing and stands in nobody's way."""

from __future__ import annotations

import pytest

from ampcheck.plugin.options import OPTIONS

PROBE = """
import sys

def pytest_unconfigure():
    needed = {"ampcheck", *("ampcheck.plugin" + name for name in ("", ".plugin", ".options"))}
    ours = {name for name in sys.modules if name.split(".")[0] == "ampcheck"}
    heavy = {"torch", "numpy", "matplotlib", "jinja2", "rich"} & set(sys.modules)
    print("imported:", *heavy, *ours - needed)
"""


@pytest.fixture
def probed(pytester: pytest.Pytester) -> pytest.Pytester:
    """A trivial suite that ends with a list of what was imported."""
    pytester.makeconftest(PROBE)
    pytester.makepyfile("def test_it(): pass")
    return pytester


def imported(result: pytest.RunResult) -> list[str]:
    (line,) = (line for line in result.outlines if line.startswith("imported:"))
    return line.split()[1:]


@pytest.mark.parametrize("arguments", [("--collect-only",), ()])
def test_unused_it_imports_nothing(probed: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    result = probed.runpytest_subprocess("-n0", *arguments)
    assert result.ret == pytest.ExitCode.OK
    assert imported(result) == []


def test_a_device_of_no_test_imports_its_option_alone(probed: pytest.Pytester) -> None:
    assert imported(probed.runpytest_subprocess("-n0", "--ampcheck-device=cuda")) == ["ampcheck.plugin.settings"]


def test_an_import_by_a_plugin_is_seen(probed: pytest.Pytester) -> None:
    """The test above can fail: an empty torch stands in for the real one, so that this is quick."""
    probed.makepyfile(torch="", heavy="import torch")
    probed.syspathinsert()
    assert imported(probed.runpytest_subprocess("-n0", "-p", "heavy", "--collect-only")) == ["torch"]


def test_a_summary_of_nothing_imports_no_torch(probed: pytest.Pytester) -> None:
    assert "torch" not in imported(probed.runpytest_subprocess("-n0", "--ampcheck"))


def test_it_can_be_switched_off(suite: pytest.Pytester, spread: str) -> None:
    result = suite.runpytest(spread, "-p", "no:ampcheck")
    result.assert_outcomes(passed=5, failed=1, xfailed=1)
    assert suite.runpytest("-p", "no:ampcheck", "--ampcheck").ret == pytest.ExitCode.USAGE_ERROR


def test_the_ini_file_of_a_suite_survives_the_plugin_being_off(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nampcheck = true\n")
    suite.runpytest("-n0", "-p", "no:ampcheck").assert_outcomes(passed=5, failed=1, xfailed=1)


def test_help_lists_every_option(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest("--help").stdout.str()
    for flag in OPTIONS:
        assert f"  {flag}" in text
        assert f"  {flag[2:].replace('-', '_')} (" in text


@pytest.mark.parametrize("inert", ["--help", "--version", "--collect-only", "--markers", "--fixtures"])
def test_where_no_test_runs_it_is_silent(suite: pytest.Pytester, inert: str) -> None:
    """A path that cannot be written matters when something is to be written."""
    result = suite.runpytest("-n0", inert, "--ampcheck-json=nowhere/run.json", "--ampcheck-device=gpu", "--ampcheck")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("ampcheck: *")
    result.stdout.no_fnmatch_line("=* ampcheck *=")


def test_collecting_writes_no_file(suite: pytest.Pytester) -> None:
    suite.runpytest("-n0", "--collect-only", "--ampcheck-json=run.json", "--ampcheck-html=page.html")
    assert not any(suite.path.glob("*.json"))
    assert not any(suite.path.glob("*.html"))


def test_benchmarks_run_beside_it(sample: pytest.Pytester) -> None:
    sample.makepyfile(
        "from sample import judge\ndef test_it(benchmark): benchmark.pedantic(judge, ('pass', 3), rounds=2)"
    )
    result = sample.runpytest("-n0", "--ampcheck")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["coverage: 6 ops", "*benchmark: 1 tests*"])


def test_options_are_none_until_they_are_given(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig()
    assert {config.getoption(flag) for flag in OPTIONS} == {None}
    assert {config.getini(flag[2:].replace("-", "_")) for flag in OPTIONS} == {None}
