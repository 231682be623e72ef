"""A failure is shown where the user's code is, without frames of ampcheck, and without the trace of the compiler."""

from __future__ import annotations

import os

import pytest
from plugin_suite import lines_of_source

import ampcheck
from ampcheck import __all__ as public
from ampcheck.core.run import describe

pytestmark = pytest.mark.usefixtures("warm_processes")

ASSERTS = {
    "assert_compiled": 'ampcheck.assert_compiled(model, [(x,)], device="gpu")',
    "assert_dtypes": "ampcheck.assert_dtypes(model, (x,), {})",
    "assert_numerics": 'ampcheck.assert_numerics(model, (x,), dtype="float17")',
    "assert_policy": 'ampcheck.assert_policy(device="gpu")',
    "assert_property": 'ampcheck.assert_property(torch.exp, "x")',
    "assert_kernel": "ampcheck.assert_kernel(3, model, (x,))",
    "assert_parity": "ampcheck.assert_parity(3, model, (x,))",
    "assert_sharded": "ampcheck.assert_sharded(ampcheck.ShardedStep(Model, model, model), ranks=0)",
    "assert_speed": "ampcheck.assert_speed({})",
    "assert_training": "ampcheck.assert_training(model)",
}
"""Each public assert with a request that it cannot fulfil."""

OTHERS = {
    "audit": 'ampcheck.audit((model, (x,)), checks="overflw")',
    "blame": 'ampcheck.blame((model, (x,)), dtype="float17")',
    "deep": "ampcheck.assert_numerics(model, (torch.ones(2, 5),), compile=False)",
    "emulate": 'ampcheck.emulate("gpu").__enter__()',
    "watch": "with ampcheck.watch(3): pass",
    "step": "with ampcheck.watch() as seen: seen.step(1.0)",
}

BEGIN = """
import pytest
import torch
import ampcheck

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x)

model, x = Model(), torch.ones(2, 4)
"""


def test_each_public_assert_is_among_them() -> None:
    assert {name for name in public if name.startswith("assert_")} == set(ASSERTS)


MARKERS = ('"overflw"', "device='gpu'", "lock=3", "overflow=True")


def test_a_usage_error_shows_no_frame_of_ampcheck(pytester: pytest.Pytester) -> None:
    calls = {**ASSERTS, **OTHERS}
    asserts = "".join(f"\ndef test_{name}():\n    {call}\n" for name, call in calls.items())
    marked = "".join(f"\n@pytest.mark.ampcheck({text})\ndef test_{i}(): pass\n" for i, text in enumerate(MARKERS))
    pytester.makepyfile(test_all=BEGIN + asserts + marked)
    result = pytester.runpytest_subprocess("-n0")
    result.assert_outcomes(failed=len(calls) + len(MARKERS))
    places = lines_of_source(result)
    assert all(place.startswith("test_all.py:") for place in places), places
    assert sum(place.endswith(": UsageError") for place in places) == len(calls) + len(MARKERS)
    assert not [line for line in result.outlines if "/ampcheck/" in line]
    assert "hidden" not in result.stdout.str()
    result.stdout.fnmatch_lines(["> *return self.inner(x)", "E *RuntimeError: *"])
    for text in MARKERS:
        result.stdout.fnmatch_lines([f"> *@pytest.mark.ampcheck({text})"])


def test_findings_of_the_marker_are_shown_at_the_marker(pytester: pytest.Pytester) -> None:
    body = "torch.full((4,), 300.0, dtype=torch.float16).mul(300.0).sum().item()"
    pytester.makepyfile(BEGIN + f"\n@pytest.mark.ampcheck\ndef test_it():\n    {body}\n")
    result = pytester.runpytest_subprocess("-n0")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "> *@pytest.mark.ampcheck*",
        "E *AssertionError: [[]overflow] fail: *.py::test_it: *",
        f"E *| *{body}",
        "E *reproduce: pytest *.py::test_it",
    ])  # fmt: skip
    assert len(lines_of_source(result)) == 1


def test_full_trace_shows_every_frame(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BEGIN + f"\ndef test_it():\n    {ASSERTS['assert_numerics']}\n")
    pytester.runpytest_subprocess("-n0", "--full-trace").stdout.fnmatch_lines(["*/ampcheck/core/*.py:*: UsageError"])


def test_a_defect_of_ampcheck_keeps_its_frames(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from ampcheck.core.run import describe\ndef test_it(): describe(None)")
    result = pytester.runpytest("-n0")
    assert describe.__module__ == "ampcheck.core.run"
    result.stdout.fnmatch_lines(["*/ampcheck/core/run.py:*: AttributeError"])


def test_an_error_of_the_users_code_that_passes_through_is_shown_in_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        BEGIN + "\ndef test_it():\n    with ampcheck.watch(fail_on='never'):\n        model(torch.ones(2, 5))\n"
    )
    result = pytester.runpytest_subprocess("-n0")
    result.assert_outcomes(failed=1)
    package = os.path.dirname(ampcheck.__file__) + os.sep
    assert not [line for line in result.outlines if os.path.abspath(line.partition(":")[0]).startswith(package)]
    result.stdout.fnmatch_lines(["*return self.inner(x)*", "E *RuntimeError: *"])


def test_a_test_without_ampcheck_is_shown_as_pytest_shows_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import contextlib\n@contextlib.contextmanager\ndef manager():\n    yield\n    assert 1 == 2\n"
        "def test_it():\n    with manager(): pass\n"
    )
    kept = ("-n0", "-p", "no:randomly", "-p", "no:cacheprovider")
    with_plugin, without = (pytester.runpytest(*kept, *more) for more in ((), ("-p", "no:ampcheck")))
    start = with_plugin.outlines.index(without.outlines[-4])
    assert with_plugin.outlines[start:-1] == without.outlines[-4:-1]
    assert [line for line in with_plugin.outlines if "contextlib" in line] == [
        line for line in without.outlines if "contextlib" in line
    ]


def test_the_log_of_a_failed_test_has_no_trace_of_the_compiler_and_keeps_what_the_user_logs(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import logging
        import pytest
        import torch

        silent = logging.getLogger("silent")
        silent.propagate = False

        @pytest.fixture
        def compiled():
            function = torch.compile(lambda x: x + 1, backend="eager")
            function(torch.ones(2))
            return function

        def test_it(compiled):
            logging.getLogger("mine").warning("it propagates")
            silent.warning("it does not propagate")
            torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
            assert False
        """
    )
    result = pytester.runpytest_subprocess("-n0", "--log-level=DEBUG")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "it propagates" in text
    assert "torch.__trace" not in text
    if tuple(map(int, pytest.__version__.split(".")[:2])) >= (9, 1):
        assert "it does not propagate" in text
