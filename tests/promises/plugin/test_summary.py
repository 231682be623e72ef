"""`--ampcheck` and its ini twin: header and summary."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from plugin_suite import Section

HEADER = f"ampcheck: {version('ampcheck')}, torch {version('torch')}, device cpu"
QUICK = pytest.mark.parametrize("spread", ["-n0", "-n2"])
"""Both ways also among the quick tests."""


def test_without_the_option_nothing_is_said(suite: pytest.Pytester) -> None:
    result = suite.runpytest("-n0")
    result.assert_outcomes(passed=5, failed=1, xfailed=1)
    result.stdout.no_fnmatch_line("ampcheck:*")
    result.stdout.no_fnmatch_line("* ampcheck *")


def test_header_and_summary(suite: pytest.Pytester, spread: str, section: Section) -> None:
    result = suite.runpytest(spread, "--ampcheck")
    result.assert_outcomes(passed=5, failed=1, xfailed=1)
    result.stdout.fnmatch_lines([HEADER])
    lines = section(result)
    assert lines[0].endswith("2 failed, 1 warning, 4 passed")
    assert "FAIL overflow: Big" in lines
    assert "coverage: 45 ops" in lines
    assert lines[-2:] == [
        "in test_suite.py::test_known (xfailed): 1 fail",
        "in test_suite.py::test_overflows (failed): 1 fail",
    ]


def test_two_workers_say_what_one_process_says(suite: pytest.Pytester, section: Section) -> None:
    one, two = (section(suite.runpytest("--ampcheck", spread)) for spread in ("-n0", "-n2"))
    assert len(one) > 10
    assert one == two


def test_the_order_of_the_tests_does_not_matter(suite: pytest.Pytester, section: Section) -> None:
    suite.makeconftest("def pytest_collection_modifyitems(items): items.reverse()")
    backward = section(suite.runpytest("-n0", "--ampcheck"))
    suite.makeconftest("")
    assert backward == section(suite.runpytest("-n0", "--ampcheck"))


@pytest.mark.parametrize("name", ["pytest.ini", "pyproject.toml"])
def test_the_ini_twin(suite: pytest.Pytester, name: str) -> None:
    table = "[pytest]" if name == "pytest.ini" else "[tool.pytest.ini_options]"
    suite.path.joinpath(name).write_text(f"{table}\nampcheck = true\n", encoding="utf-8")
    suite.runpytest("-n0").stdout.fnmatch_lines([HEADER, "=* ampcheck *="])
    suite.runpytest("-n0", "-o", "ampcheck=false").stdout.no_fnmatch_line(HEADER)


def test_a_bad_ini_value_is_a_usage_error(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nampcheck = perhaps\n")
    result = suite.runpytest("-n0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: ampcheck of the ini file cannot be read: *perhaps*"])


def test_a_suite_that_emits_nothing_gets_no_verdict(pytester: pytest.Pytester, spread: str, section: Section) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest(spread, "--ampcheck")
    assert result.ret == pytest.ExitCode.OK
    lines = section(result)
    assert " ".join(lines).startswith("pytest of ")
    assert "coverage: nothing was looked at" in lines
    assert lines[-1].startswith("hint: ")


def test_no_tests_at_all(pytester: pytest.Pytester, section: Section) -> None:
    result = pytester.runpytest("-n0", "--ampcheck")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "coverage: nothing was looked at" in section(result)


def test_no_summary_is_heeded(suite: pytest.Pytester) -> None:
    result = suite.runpytest("-n0", "--ampcheck", "--no-summary")
    result.stdout.no_fnmatch_line("=* ampcheck *=")
    result.assert_outcomes(passed=5, failed=1, xfailed=1)


@QUICK
def test_every_phase_of_a_test_counts(sample: pytest.Pytester, spread: str, section: Section) -> None:
    sample.makepyfile(
        """
        import pytest
        from sample import judge

        @pytest.fixture
        def around():
            judge("pass", 1)
            yield
            judge("pass", 100)

        def test_it(around):
            judge("pass", 10)
        """
    )
    assert section(sample.runpytest(spread, "--ampcheck"))[-1] == "coverage: 111 ops"


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("setup", "failed"), ("teardown", "failed"), ("skip", "skipped"), ("xpass", "xpassed"), ("strict", "failed")],
)
def test_the_outcome_is_that_of_the_whole_test(sample: pytest.Pytester, name: str, outcome: str) -> None:
    from ampcheck import Run

    sample.makepyfile(
        """
        import pytest
        from sample import judge

        @pytest.fixture
        def bad_setup():
            judge("fail")

        @pytest.fixture
        def bad_teardown():
            yield
            assert False

        def test_setup(bad_setup): pass
        def test_teardown(bad_teardown): judge("pass")
        def test_skip(): judge("pass"); pytest.skip()
        @pytest.mark.xfail
        def test_xpass(): judge("pass")
        @pytest.mark.xfail(strict=True)
        def test_strict(): judge("pass")
        """
    )
    sample.runpytest("-n0", "-k", name, "--ampcheck-json=run.json")
    (row,) = Run.load(sample.path / "run.json").tables[0].rows
    assert row[1] == outcome


def test_an_attempt_that_is_repeated_counts_once(sample: pytest.Pytester, section: Section) -> None:
    """What pytest-rerunfailures does: the phases of one item run again."""
    sample.makeconftest(
        """
        from _pytest.runner import runtestprotocol

        def pytest_runtest_protocol(item, nextitem):
            runtestprotocol(item, log=False, nextitem=item)
            item._initrequest()
            runtestprotocol(item, log=True, nextitem=nextitem)
            return True
        """
    )
    sample.makepyfile("from sample import judge\ndef test_it(): judge('pass', 7)")
    assert section(sample.runpytest("-n0", "--ampcheck"))[-1] == "coverage: 7 ops"


def test_asserts_work_under_given(sample: pytest.Pytester, section: Section) -> None:
    sample.makepyfile(
        """
        from hypothesis import given, settings, strategies as st
        from sample import judge

        @settings(max_examples=5, database=None)
        @given(st.integers())
        def test_it(x):
            judge("pass", 2)
        """
    )
    assert section(sample.runpytest("-n0", "--ampcheck"))[-1] == "coverage: 10 ops"


def test_of_the_examples_that_fail_the_last_is_told(sample: pytest.Pytester, section: Section) -> None:
    """Hypothesis fails many on its way to the smallest."""
    sample.makepyfile(
        """
        from hypothesis import given, settings, strategies as st
        from sample import judge

        @settings(database=None, derandomize=True)
        @given(st.integers(0, 1000))
        def test_it(x):
            judge("pass")
            judge("fail" if x > 37 else "pass", message=f"x is {x}")
        """
    )
    lines = section(sample.runpytest("-n0", "--ampcheck", "--tb=no"))
    assert [line for line in lines if line.startswith("  x is")] == ["  x is 38"]
    assert ": 1 failed, " in " ".join(lines)


def test_a_run_of_things_that_are_not_plain_fails_its_test_alone(sample: pytest.Pytester, spread: str) -> None:
    sample.makepyfile(
        """
        import ampcheck
        from ampcheck.core.run import emit
        from sample import judge

        def test_bad(): emit(ampcheck.Run({"device": object()}))
        def test_good(): judge("pass")
        """
    )
    result = sample.runpytest(spread, "--ampcheck")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*UsageError: an emitted run must contain only plain Python data*object*"])


@QUICK
def test_a_run_that_cannot_be_drawn_fails_its_test_alone(sample: pytest.Pytester, spread: str) -> None:
    sample.makepyfile(
        """
        import ampcheck
        from ampcheck.core.run import Table, emit
        from sample import judge

        def test_bad(): emit(ampcheck.Run(tables=(Table("t", ("a", "b"), ((1,),)),)))
        def test_good(): judge("pass")
        """
    )
    result = sample.runpytest(spread, "--ampcheck")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*UsageError: *each row of the table 't' must have a cell for each column*"])


def test_a_failure_shows_the_test_and_not_the_plugin(suite: pytest.Pytester) -> None:
    result = suite.runpytest("-n0", "--ampcheck")
    result.stdout.fnmatch_lines(["E *AssertionError: [[]overflow[]] fail: Big: an output stays finite"])
    for file in ("plugin/plugin.py", "contextlib.py", "core/run.py"):
        result.stdout.no_fnmatch_line(f"*{file}*")


def test_each_of_many_failures_is_named_in_a_line(sample: pytest.Pytester, section: Section) -> None:
    sample.makepyfile(
        """
        import pytest
        from sample import judge

        @pytest.mark.parametrize("number", range(30))
        def test_it(number): judge("fail", subject=f"Model {number}")
        """
    )
    lines = section(sample.runpytest("-n0", "--ampcheck"))
    assert sum(line.startswith("FAIL overflow: Model") for line in lines) == 30
    assert lines[-1] == "in 27 more tests"
    assert len(lines) <= 30 + 7
    full = section(sample.runpytest("-n0", "--ampcheck", "-vv"))
    assert sum(line.startswith("FAIL overflow: Model") for line in full) == 30
    assert not any("left out" in line for line in full)


def test_an_interrupted_session_reports_the_tests_that_ran_and_says_so(
    sample: pytest.Pytester, section: Section
) -> None:
    from ampcheck import Run

    sample.makepyfile(
        """
        from sample import judge

        def test_first(): judge("pass", 3)
        def test_second(): raise KeyboardInterrupt
        def test_third(): judge("pass", 5)
        """
    )
    result = sample.runpytest("-n0", "--ampcheck-json=run.json", no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    lines = section(result)
    assert " ".join(" ".join(lines).split()).split(", ")[1].startswith("interrupted: 1 passed ")
    run = Run.load(sample.path / "run.json")
    assert (run.title.rpartition(", ")[2], run.coverage.total) == ("interrupted", 3)


def test_the_summary_says_why_tests_were_skipped(suite: pytest.Pytester, section: Section, spread: str) -> None:
    """`ampcheck init` skips a test until its arguments are filled in; without the reason it reads as nothing to do."""
    skipped = (f"@pytest.mark.skip(reason='reason {i}')\ndef test_{i}(): pass\n" for i in range(5))
    called = (
        "def test_fill(): pytest.skip('fill in the arguments')\ndef test_too(): pytest.skip('fill in the arguments')\n"
    )
    suite.makepyfile(test_skips="import pytest\n" + called + "".join(skipped))
    lines = section(suite.runpytest(spread, "--ampcheck", "test_skips.py"))
    assert lines[-4:] == [
        "2 tests skipped: fill in the arguments",
        "1 test skipped: reason 0",
        "1 test skipped: reason 1",
        "3 more tests skipped; -rs shows why",
    ]


def test_findings_that_a_traceback_shows_are_only_named_below(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from ampcheck.core.run import Coverage, Finding, Run, Verdict, Where
        from ampcheck.outcome.raising import verify

        def test_model():
            where = Where("forward", op="aten::mul", file="m.py", line=3)
            failed = Finding("overflow", Verdict.FAIL, "net", "41 became inf", where, hint="scale it")
            verify(Run(findings=(failed,), coverage=Coverage({"ops": 1})))
        """
    )
    for options, in_full in (((), False), (("--tb=no",), True), (("-vv",), True)):
        result = pytester.runpytest_subprocess("--ampcheck", "-p", "no:cacheprovider", *options)
        summary = result.stdout.str().partition(" ampcheck ==")[2].partition("short test summary")[0]
        assert "FAIL overflow: net" in summary
        assert ("hint: scale it" in summary) is in_full, options
