"""What is promised of the fixture `golden`: rounding passes, a change fails, and a file is written on request alone."""

from __future__ import annotations

import json

import pytest
import torch  # pytester drops what a run in this process imports, and torch does not load twice

LIBRARY = torch.library.Library("golden_tests", "DEF")
LIBRARY.define("kernel(Tensor x) -> Tensor")
LIBRARY.impl("kernel", lambda x: x.cos(), "CPU")

TEST = """
import torch

WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()

def mean(x):
    return ({x} @ WEIGHT).float().mean(-1){after}

def test_mean(golden):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    golden.check("mean", mean, x)
"""


def run(pytester: pytest.Pytester, *arguments: str, x: str = "x", after: str = "") -> pytest.RunResult:
    pytester.makepyfile(test_mean=TEST.format(x=x, after=after))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def test_a_golden_is_written_on_request_and_then_compared(pytester: pytest.Pytester) -> None:
    missing = run(pytester)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*a golden must be recorded*"])
    written = run(pytester, "--ampcheck-update")
    written.assert_outcomes(passed=1)
    written.stdout.fnmatch_lines(["updated *test_mean.json: test_mean: mean"])
    run(pytester).assert_outcomes(passed=1)
    text = (pytester.path / "goldens" / "test_mean.json").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) < 200, "a review shows it line by line"


def test_other_roundings_pass_and_another_function_fails(pytester: pytest.Pytester) -> None:
    run(pytester, "--ampcheck-update").assert_outcomes(passed=1)
    run(pytester, x="x.float().bfloat16()").assert_outcomes(passed=1)
    three_roundings = " * (1 + 3 * 2**-8)"
    failed = run(pytester, after=three_roundings)
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["*exact values must be those that were recorded*"])
    run(pytester, after=" * (1 + 1e-7)").assert_outcomes(failed=1)


def test_values_that_are_worse_than_rounding_fail_though_the_function_is_the_same(pytester: pytest.Pytester) -> None:
    run(pytester, "--ampcheck-update").assert_outcomes(passed=1)
    failed = run(pytester, x="(x + 300 - 300)")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["*as near to float64 as its roundings explain*"])


POOLED = """
import torch

STATES = torch.randn(4, 256, 32, generator=torch.Generator().manual_seed(0)).bfloat16()

def pooled(states):
    {body}

def test_pooled(golden):
    golden.check("pooled", pooled, {states})
"""
MEAN = "return states.mean(1)"
PAIRS = "return states.float().flip(1).unflatten(1, (4, -1)).sum(1).sum(1).div(256).bfloat16()"
LOOP = "return sum(states.unbind(1), torch.zeros_like(states[:, 0])) / 256"
IN_FLOAT32 = "return states.cumsum(-1)"
IN_BFLOAT16 = "return states.bfloat16().cumsum(-1).float()"
ALL = "STATES"
FEW = "STATES[:1, :, :4]"  # four means, of which one run says little
WIDE = "STATES.float()"


@pytest.mark.parametrize(
    ("recorded", "body", "states", "worse"),
    [
        (MEAN, PAIRS, ALL, False),
        (MEAN, LOOP, ALL, True),
        (MEAN, LOOP, FEW, False),
        (IN_FLOAT32, IN_BFLOAT16, WIDE, True),
    ],
)
def test_an_error_far_above_the_recorded_one_fails(
    pytester: pytest.Pytester, recorded: str, body: str, states: str, worse: bool
) -> None:
    def run(*arguments: str, body: str = recorded) -> pytest.RunResult:
        pytester.makepyfile(test_pooled=POOLED.format(body=body, states=states))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)

    run("--ampcheck-update").assert_outcomes(passed=1)
    run().assert_outcomes(passed=1)
    result = run(body=body)
    result.assert_outcomes(failed=worse, passed=not worse)
    if worse:
        result.stdout.fnmatch_lines(["*a run must be as near to float64 as the recorded one*times as large*"])
    path = pytester.path / "goldens" / "test_pooled.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    for golden in data["goldens"]["test_pooled: pooled"]["results"].values():
        del golden["error"]  # as files have it that were written before
    path.write_text(json.dumps(data), encoding="utf-8")
    run(body=body).assert_outcomes(passed=1)


def test_a_damaged_file_gets_one_sentence(pytester: pytest.Pytester) -> None:
    run(pytester, "--ampcheck-update").assert_outcomes(passed=1)
    path = pytester.path / "goldens" / "test_mean.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["goldens"]["test_mean: mean"]["results"]["output"]["noise"] = []
    path.write_text(json.dumps(data), encoding="utf-8")
    failed = run(pytester)
    failed.stdout.fnmatch_lines(["*golden 'test_mean: mean' of *is damaged*"])
    path.write_text("{", encoding="utf-8")
    run(pytester).stdout.fnmatch_lines(["*test_mean.json cannot be read*"])


def test_other_arguments_fail_and_other_last_digits_leave_it_open_with_a_warning(pytester: pytest.Pytester) -> None:
    run(pytester, "--ampcheck-update").assert_outcomes(passed=1)
    pytester.makepyfile(test_mean=TEST.replace("manual_seed(0)", "manual_seed(2)").format(x="x", after=""))
    failed = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["*the arguments must be those that the golden was recorded with; argument 0.0*"])
    wide = TEST.replace(".bfloat16()", "").format(x="x", after="")
    pytester.makepyfile(test_wide=wide)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--ampcheck-update", "test_wide.py").assert_outcomes(
        passed=1
    )
    pytester.makepyfile(test_wide=wide.replace("manual_seed(0))", "manual_seed(0)) * (1 + 2**-22)"))
    opened = pytester.runpytest_inprocess("-W", "default", "-p", "no:cacheprovider", "test_wide.py")
    opened.assert_outcomes(passed=1, warnings=1)
    opened.stdout.fnmatch_lines(["*is undecided: exact values differ, and so do the last digits of argument 0.0*"])
    other = wide.replace("manual_seed(0))", "manual_seed(0)) * (1 + 2**-22)").replace("mean(-1)", "mean(-1) * 3")
    pytester.makepyfile(test_wide=other)
    failed = pytester.runpytest_inprocess("-p", "no:cacheprovider", "test_wide.py")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["*exact values must be those that were recorded*"])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("x.float().sin()", "(x.float() * 1e5).sin()", "*exact values must be those that were recorded*"),
        ("(x - 4.5) / 0", "(4.5 - x) / 0", "*inf, -inf and NaN are other elements in float64*"),
        (
            "(kernel(x.detach()), x * 2)",
            "(kernel(x.detach()), x * 3)",
            "*exact values must be those that were recorded*",
        ),
    ],
)
def test_what_the_new_run_is_excuses_no_change(
    pytester: pytest.Pytester, first: str, second: str, message: str
) -> None:
    test = """
    import torch

    kernel = torch.ops.golden_tests.kernel

    def test_values(golden):
        golden.check("values", lambda x: {change}, torch.arange(9.0) + 0.5)
    """
    for number, change in enumerate((first, second)):
        pytester.makepyfile(test_golden_values=test.format(change=change))
        arguments = [] if number else ["--ampcheck-update"]
        done = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
        done.assert_outcomes(**{"failed" if number else "passed": 1})
    done.stdout.fnmatch_lines([message])


def test_formats_signs_of_infinities_and_single_elements_count(pytester: pytest.Pytester) -> None:
    test = """
    import torch

    def test_values(golden):
        x = torch.arange(1.0, 100_001.0)
        golden.check("values", lambda x: {change}, x)

    class TestA:
        def test_values(self, golden):
            golden.check("values", lambda x: x * 3, torch.arange(4.0))
    """
    honest = "torch.where(x > 9e4, torch.inf, x * 3)"
    for change, outcome in (
        (honest, {"passed": 2}),
        ("torch.where(x > 9e4, -torch.inf, x * 3)", {"passed": 1, "failed": 1}),
        ("torch.where(x > 9e4, torch.inf, x * 3).double()", {"passed": 1, "failed": 1}),
        ("torch.where(x > 9e4, torch.inf, torch.where(x == 777, x * 3.00001, x * 3))", {"passed": 1, "failed": 1}),
    ):
        pytester.makepyfile(test_golden_values=test.format(change=change))
        arguments = ["--ampcheck-update"] if change is honest else []
        pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments).assert_outcomes(**outcome)


def test_integers_and_numbers_count(pytester: pytest.Pytester) -> None:
    test = """
    import torch

    def test_values(golden):
        golden.check("values", lambda x: (x.sum().long() + {more}, {number}), torch.arange(4.0))
    """
    for more, number, outcome in ((0, 0.5, "passed"), (5, 0.5, "failed"), (0, 0.25, "failed"), (0, 0.5, "passed")):
        pytester.makepyfile(test_golden_values=test.format(more=more, number=number))
        first = (more, number, outcome) == (0, 0.5, "passed") and not (pytester.path / "goldens").exists()
        arguments = ["--ampcheck-update"] if first else []
        pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments).assert_outcomes(**{outcome: 1})


def test_an_int_and_a_bool_count(pytester: pytest.Pytester) -> None:
    test = """
    import torch

    def test_values(golden):
        golden.check("values", lambda x: (x * 2, {whole}, {flag}), torch.arange(4.0))
    """
    for whole, flag, outcome in ((5, True, "passed"), (6, True, "failed"), (5, False, "failed"), (5, True, "passed")):
        pytester.makepyfile(test_golden_values=test.format(whole=whole, flag=flag))
        arguments = [] if (pytester.path / "goldens").exists() else ["--ampcheck-update"]
        pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments).assert_outcomes(**{outcome: 1})
