"""The fixture `speed` and its marker: verdicts, and what becomes of pytest-benchmark's options."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from plugin_suite import Section, lines_of_source
from speed_suite import Suite, benchmarks, findings
from speed_suite import speedy as speedy

from ampcheck import UsageError
from ampcheck.plugin.speed_fixture import OF_MEASURING, RecordedTimer, Speed
from ampcheck.records.speed import SpeedRecord

VERDICTS = """
def test_pays(speed):
    run = speed(arms(), at_least=1.2, budget=1, clock=Clock())
    assert [str(finding.verdict) for finding in run.findings] == ["pass"]

@pytest.mark.ampcheck(speed=dict(at_least=3.0, budget=1, precision="bfloat16"))
def test_marked(speed):
    speed(arms(), clock=Clock())

@pytest.mark.ampcheck(speed=dict(at_least=3.0, budget=1))
def test_marked_and_said(speed):
    speed(arms(), clock=Clock(), at_least=1.5)

def test_undecided(speed):
    speed(arms(compiled=0.0167), at_least=1.2, budget=0.5, clock=Clock(noise=0.3))

def test_measured(speed):
    assert speed.measure(arms(), budget=2, clock=Clock()).cycles >= 20

def test_two_arms(speed):
    speed(arms(autotuned=0.008), at_least={"compiled": 1.2, "autotuned": 1.5}, budget=1, clock=Clock())
"""


def test_verdicts_reach_the_test_the_summary_and_the_files(speedy: Suite, section: Section) -> None:
    suite = speedy(VERDICTS)
    result = suite.runpytest(
        "-n0", "--ampcheck-json=run.json", "--ampcheck-html=run.html", "--benchmark-json=saved.json"
    )
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["E *compiled must be at least 3 times as fast as eager*"])
    assert "1 failed, 1 undecided, 4 passed" in " ".join(" ".join(section(result)).split())
    assert "in test_speeds.py::test_marked (failed): 1 fail" in section(result)
    told = {(one["subject"].partition("::")[2], one["verdict"]) for one in findings(suite, "speedup")}
    assert told == {
        ("test_pays", "pass"),
        ("test_marked", "fail"),
        ("test_marked_and_said", "pass"),
        ("test_undecided", "undecided"),
        ("test_two_arms", "pass"),
    }
    assert "speed of test_speeds.py::test_pays" in suite.path.joinpath("run.html").read_text(encoding="utf-8")

    kept = benchmarks(suite)
    assert len(kept) == 6, "a test that fails is kept as well"
    one = SpeedRecord.from_dict(kept["test_marked"]["extra_info"]["ampcheck"])
    assert (one.name, one.reference, one.arm) == ("test_speeds.py::test_marked", "eager", "compiled")
    assert (one.verdict, one.precision) == ("fail", "bfloat16")
    assert one.ratio == pytest.approx(2.0, rel=0.02)
    assert one.low <= one.ratio <= one.high
    assert one.fingerprint["torch"]
    assert kept["test_undecided"]["extra_info"]["ampcheck"]["verdict"] == "undecided"
    assert kept["test_measured"]["extra_info"]["ampcheck"]["verdict"] == ""
    assert [kept["test_two_arms"]["extra_info"]["ampcheck"][n]["arm"] for n in (0, 1)] == ["compiled", "autotuned"]


def test_the_confidence_is_that_of_all_tests_that_run_and_the_arms_of_each(speedy: Suite) -> None:
    suite = speedy(VERDICTS)
    suite.runpytest("-n0", "--ampcheck-json=run.json", "--deselect=test_speeds.py::test_measured")
    told = {one["subject"].partition("::")[2]: one["message"] for one in findings(suite, "speedup")}
    assert "99.9 % confidence" in told["test_pays"]  # 1 - 2 * 0.01 / (5 tests * 1 arm * 4 looks)
    assert "99.95 % confidence" in told["test_two_arms"]


def test_without_ampcheck_what_fails_no_test_is_still_mentioned(speedy: Suite) -> None:
    suite = speedy(VERDICTS)
    result = suite.runpytest("-n0")
    result.stdout.fnmatch_lines(["ampcheck: 1 undecided among the findings of speed tests; --ampcheck shows them"])
    result = suite.runpytest("-n0", "-k", "pays")
    result.stdout.no_fnmatch_line("*among the findings of speed tests*")


# pytest-benchmark ------------------------------------------------------------------------------------------------


def test_pytest_benchmark_takes_the_measured_seconds_as_they_are(speedy: Suite) -> None:
    """The contract: `timer` of the marker is read at both ends of each round of `pedantic`, and nowhere else."""
    suite = speedy("""
def test_kept(speed, benchmark):
    stats = speed.measure(arms(), budget=1, clock=Clock())
    assert benchmark.stats.stats.data == list(stats.arm("compiled").seconds)

@pytest.mark.benchmark(group="mine", disable_gc=True, min_rounds=3)
def test_marked(speed):
    speed(arms(), budget=1, clock=Clock())
""")
    suite.runpytest("-n0", "--benchmark-json=saved.json").assert_outcomes(passed=2)
    kept = benchmarks(suite)["test_marked"]
    assert kept["group"] == "mine"
    assert kept["options"]["disable_gc"] is True
    assert kept["options"]["timer"] == "ampcheck"
    assert kept["stats"]["median"] == pytest.approx(0.01, rel=0.02)
    assert kept["stats"]["iterations"] == 1
    assert kept["stats"]["rounds"] == kept["extra_info"]["ampcheck"]["cycles"]


@pytest.mark.parametrize(("readings", "how"), [(3, "more"), (1, "less")])
def test_another_way_to_read_the_timer_would_be_told(readings: int, how: str) -> None:
    """The contract above is watched where it is used, too."""
    timer = RecordedTimer()

    class Other:
        def pedantic(self, target: object, rounds: int) -> None:
            for _ in range(readings * rounds):
                timer()

    with pytest.raises(UsageError, match=rf"pytest-benchmark [\d.]+ reads its timer {how} than twice a round"):
        timer.replay(Other(), [0.1, 0.2], lambda: None)


def test_a_profile_runs_the_arm_itself(speedy: Suite) -> None:
    suite = speedy()
    result = suite.runpytest("-n0", "--benchmark-cprofile=ncalls")
    result.stdout.fnmatch_lines(["*cProfile*", "*clocks.py:*(step)*"])


def test_its_table_its_columns_and_its_groups(speedy: Suite) -> None:
    suite = speedy("""
@pytest.mark.parametrize("size", [1, 2])
def test_sized(speed, size):
    speed(arms(), budget=0.5, clock=Clock())
""")
    result = suite.runpytest("-n0", "--benchmark-columns=median,rounds", "--benchmark-group-by=param:size")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*benchmark 'size=1': 1 tests*", "Name*Median*Rounds*", "test_sized[[]1[]] *"])
    result.stdout.fnmatch_lines(["*benchmark 'size=2': 1 tests*"])
    result.stdout.no_fnmatch_line("*StdDev*")


def test_only_and_skip_know_a_speed_test_as_a_benchmark(speedy: Suite) -> None:
    suite = speedy("""
def test_pays(speed):
    speed(arms(), budget=0.5, clock=Clock())

def test_other():
    pass
""")
    suite.runpytest("-n0", "--benchmark-only").assert_outcomes(passed=1, skipped=1)
    suite.runpytest("-n0", "--benchmark-skip").assert_outcomes(passed=1, skipped=1)


DISABLED = """
def test_pays(speed):
    del called[:]
    run = speed(arms(autotuned=0.1), at_least={"autotuned": 100.0}, clock=Clock())
    assert called == ["eager", "compiled", "autotuned"]
    assert [str(finding.verdict) for finding in run.findings] == ["skip"]

def test_measured(speed):
    speed.measure(arms(), clock=Clock())
    raise AssertionError("there are no figures to go on with")

def test_raises(speed):
    with pytest.raises(ZeroDivisionError):
        speed({"eager": lambda: 1, "compiled": lambda: 1 / 0}, clock=Clock())
"""


def test_disabled_each_arm_runs_once_and_the_verdict_is_skip(speedy: Suite) -> None:
    suite = speedy(DISABLED)
    result = suite.runpytest("-n0", "-rs", "--benchmark-disable", "--ampcheck-json=run.json")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *nothing was measured: --benchmark-disable is on"])
    assert [one["verdict"] for one in findings(suite)] == ["skip", "skip"]
    assert all("--benchmark-disable is on" in one["message"] for one in findings(suite))
    suite.runpytest("-n0", "--benchmark-disable", "--benchmark-enable", "-k", "pays").assert_outcomes(failed=1)


def test_under_xdist_it_is_skipped_with_one_warning_for_all_and_warnings_may_be_errors(speedy: Suite) -> None:
    suite = speedy(DISABLED)
    suite.makeini("[pytest]\nfilterwarnings = error\n")
    result = suite.runpytest_subprocess("-n1", "--ampcheck-json=run.json", "--ampcheck-history=history")
    result.assert_outcomes(passed=2, skipped=1, warnings=0)
    text = result.stdout.str() + result.stderr.str()
    assert text.count("Warning: ") <= 1, "pytest-benchmark's own, of the session: not every version has it"
    assert {one["verdict"] for one in findings(suite)} == {"skip"}
    assert all("tests run side by side under xdist" in one["message"] for one in findings(suite))
    result.stdout.fnmatch_lines(["nothing was added to the history in *: tests run side by side under xdist"])
    assert not suite.path.joinpath("history").exists()


# What goes wrong -------------------------------------------------------------------------------------------------

WRONG = {
    "a second time": ("speed(arms(), budget=1, clock=Clock())\n    speed(arms())", "*test_it measures a second time*"),
    "one arm": ("speed({'eager': int})", "*two or more arms are required*"),
    "an arm that raises": (
        "speed({'eager': int, 'compiled': lambda: 1 / 0}, budget=0.01)",
        "*arm 'compiled' of test_speeds.py::test_it raised ZeroDivisionError*",
    ),
    "an unknown arm": ("speed(arms(), at_least={'compild': 2})", "*at_least names 'compild'*"),
    "a bad budget": ("speed(arms(), budget=-1)", "*budget must be a finite number above 0; found -1*"),
    "a missing device": ("speed(arms(), device='cuda:99')", "*speed is measured on the device itself and 'cuda:99'*"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_is_one_error_and_no_warning_besides(speedy: Suite, wrong: str) -> None:
    call, told = WRONG[wrong]
    result = speedy(f"def test_it(speed):\n    {call}\n").runpytest("-n0")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *UsageError: {told}"])
    assert lines_of_source(result)[-1].startswith("test_speeds.py:"), "shown where it was asked, not in ampcheck"


@pytest.mark.parametrize(
    ("marker", "told"),
    [
        ("at_leest=1.2", "a speed test takes no 'at_leest'; it takes at_least, *"),
        ("precision='half'", "precision must be one of *"),
        ("width=0.01", "test_it sets width, which has no effect: speed(...) measures until*"),
        ("comparisons='3'", "comparisons must be a whole number, 1 or more; found '3'"),
    ],
)
def test_a_marker_that_says_something_else_is_an_error(speedy: Suite, marker: str, told: str) -> None:
    suite = speedy(f"@pytest.mark.ampcheck(speed=dict({marker}))\ndef test_it(speed):\n    speed(arms())\n")
    result = suite.runpytest("-n0")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *UsageError: {told}"])


@pytest.mark.parametrize("marker", ["at_least=1.2", "comparisons=3", "false_alarms=0.1"])
def test_what_a_verdict_needs_is_an_error_where_none_is_asked_for(speedy: Suite, marker: str) -> None:
    suite = speedy(
        f"@pytest.mark.ampcheck(speed=dict({marker}))\ndef test_it(speed):\n    speed.measure(arms(), clock=Clock())\n"
    )
    result = suite.runpytest("-n0")
    result.assert_outcomes(failed=1)
    name = marker.partition("=")[0]
    result.stdout.fnmatch_lines([f"E *UsageError: test_it sets {name}, which has no effect: *"])


def test_measuring_alone_may_be_marked_with_what_it_takes(speedy: Suite) -> None:
    suite = speedy("""
@pytest.mark.ampcheck(speed=dict(width=0.5, effect=0.2, budget=1, precision="bfloat16", seed=3))
def test_it(speed):
    speed.measure(arms(), clock=Clock())
""")
    suite.runpytest("-n0").assert_outcomes(passed=1)


def test_a_marked_test_that_measures_nothing_is_an_error(speedy: Suite) -> None:
    suite = speedy("@pytest.mark.ampcheck(speed=dict(at_least=2))\ndef test_it():\n    pass\n")
    result = suite.runpytest("-n0")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E *test_it is marked with ampcheck(speed=...) and does not take the fixture speed*"])


FOREIGN = """
from types import SimpleNamespace

import pytest

@pytest.mark.parametrize("speed", [1, 2])
def test_parametrized(speed, benchmark):
    assert benchmark(lambda: speed) == speed
    assert benchmark.stats.stats.max > 0

@pytest.fixture
def speed(benchmark):
    return benchmark

def test_own_fixture(speed):
    assert speed(lambda: 3) == 3
    assert speed.stats.stats.max > 0

"""


def test_other_peoples_use_of_the_name_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FOREIGN)
    pytester.runpytest("-n0", "--strict-markers").assert_outcomes(passed=3)


def test_a_fixture_of_the_same_name_may_be_built_on_it(speedy: Suite) -> None:
    suite = speedy("""
@pytest.fixture
def speed(speed):
    return lambda steps: speed(steps, at_least=1.2, budget=0.5, clock=Clock())

def test_it(speed):
    speed(arms())
""")
    suite.runpytest("-n0", "--strict-markers").assert_outcomes(passed=1)


def test_without_pytest_benchmark_it_is_told(speedy: Suite) -> None:
    result = speedy().runpytest("-n0", "-p", "no:benchmark")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E *the fixture speed requires pytest-benchmark, which is off*"])


@pytest.mark.parametrize("marker", ["", "@pytest.mark.ampcheck(speed=dict(at_least=1.2))\n"], ids=["plain", "marked"])
def test_a_test_that_takes_it_and_measures_nothing_fails(speedy: Suite, marker: str) -> None:
    suite = speedy(f"{marker}def test_it(speed):\n    pass\n")
    result = suite.runpytest("-n0")
    result.assert_outcomes(failed=1, errors=1)  # the error is pytest-benchmark's own warning
    result.stdout.fnmatch_lines(["*test_it takes the fixture speed and never called it, so nothing was judged*"])


def test_a_test_that_takes_it_and_skips_itself_is_skipped(speedy: Suite) -> None:
    result = speedy("def test_it(speed):\n    pytest.skip('no GPU')\n").runpytest("-n0", "-W", "ignore")
    result.assert_outcomes(skipped=1)


def test_asked_for_by_name_it_is_told(speedy: Suite) -> None:
    result = speedy("def test_it(request):\n    request.getfixturevalue('speed')\n").runpytest("-n0")
    result.stdout.fnmatch_lines(["E *the fixture speed is taken as an argument of a test or fixture*"])


def test_a_fixture_may_be_built_on_it(speedy: Suite) -> None:
    suite = speedy("""
@pytest.fixture
def pays(speed):
    return lambda steps: speed(steps, at_least=1.2, budget=0.5, clock=Clock())

def test_it(pays):
    pays(arms())
""")
    suite.runpytest("-n0", "--strict-markers").assert_outcomes(passed=1)


def test_real_steps_are_timed_by_the_real_clock(speedy: Suite) -> None:
    suite = speedy("""
def test_it(speed):
    speed({"long": lambda: sum(range(20000)), "short": lambda: sum(range(100))}, at_least=0.001, budget=0.05)
""")
    suite.runpytest("-n0", "--benchmark-json=saved.json").assert_outcomes(passed=1)
    assert benchmarks(suite)["test_it"]["stats"]["min"] > 0


@pytest.mark.parametrize("first", [UsageError("no"), KeyboardInterrupt(), pytest.skip.Exception("no")])
def test_ctrl_c_ends_the_session_also_while_pytest_benchmark_is_told_of_an_error(first: BaseException) -> None:
    def pressed(target: object) -> None:
        raise KeyboardInterrupt

    speed = object.__new__(Speed)
    speed.used, speed._device = False, "cpu"
    speed._benchmark = SimpleNamespace(stats=None, pedantic=pressed)
    speed._item = SimpleNamespace(nodeid="test_it", name="test_it", get_closest_marker=lambda name: None)
    with pytest.raises(KeyboardInterrupt), speed._options({}, OF_MEASURING):
        raise first
