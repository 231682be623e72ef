"""`assert_property`: what it takes, what it says, and that the same seed says it again."""

from __future__ import annotations

import importlib
import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from searches import search
from textbook import softmax, stable_softmax

import ampcheck
from ampcheck import UsageError, assert_property
from ampcheck.core.run import Run, Verdict, collect
from ampcheck.search import BatchOrder, Declared, Padding, Scale, SearchOptions, Shift
from ampcheck.strategies import tensors

WIDE = tensors("float16", shape=4, min_value=-100, max_value=100)
NARROW = tensors("float16", shape=3, min_value=-4, max_value=4)


def failing(*args: Any, **kwargs: Any) -> Run:
    """The run of a search that must fail."""
    with collect() as runs, pytest.raises(AssertionError):
        search(*args, **kwargs)
    return runs[0]


def test_a_failure_says_what_was_required_what_came_out_where_and_how_to_see_it_again() -> None:
    failures = failing(softmax, inputs=WIDE).of(Verdict.FAIL)
    finding = next(one for one in failures if one.check == "property-finite")
    assert finding.subject == "softmax [float16 native, eager]"
    assert "finite inputs must give finite outputs" in finding.message
    assert "The smallest input found is torch.tensor([" in finding.message
    assert "of 200 examples" in finding.message
    assert finding.where.op == "aten::exp"
    assert finding.where.file.endswith("textbook.py")
    assert finding.observed == finding.observed
    assert finding.hint


def test_a_pass_says_how_much_was_looked_at() -> None:
    run = assert_property(stable_softmax, inputs=WIDE, compile=False, options=SearchOptions(examples=40))
    assert {f.check: f.verdict for f in run.findings} == dict.fromkeys(
        ("property-finite", "property-accuracy", "headroom", "coverage"), Verdict.PASS
    )
    assert 1 <= run.coverage.seen["examples"] <= 40
    assert run.coverage.seen["elements"] == 4 * run.coverage.seen["examples"]
    properties = [f for f in run.findings if f.check.startswith("property-")]
    assert all(f"{run.coverage.seen['examples']} examples" in f.message for f in properties)


def test_the_same_seed_finds_the_same_and_the_random_streams_go_on_as_if_nothing_had_been() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one, other = (failing(softmax, inputs=WIDE, seed=5) for _ in range(2))
    assert one.findings == other.findings
    assert torch.equal(torch.random.get_rng_state(), before)


def test_examples_bound_the_search() -> None:
    assert (
        assert_property(torch.tanh, inputs=WIDE, compile=False, options=SearchOptions(examples=7)).coverage.seen[
            "examples"
        ]
        <= 7
    )


def test_what_was_not_looked_at_for_want_of_seconds_is_told() -> None:
    run = assert_property(torch.tanh, inputs=WIDE, compile=False, options=SearchOptions(seconds=1e-9))
    (coverage,) = (f for f in run.findings if f.check == "coverage")
    assert "of 200 examples, since the 1e-09 seconds were spent" in coverage.message


def test_nothing_looked_at_fails() -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    run = failing(never, inputs=WIDE, examples=5)
    assert [f.check for f in run.of(Verdict.FAIL)] == ["coverage"]
    assert "not today" in run.findings[0].message


def test_float32_inputs_are_judged_under_autocast_in_both_formats() -> None:
    torch.manual_seed(0)
    run = assert_property(
        torch.nn.Linear(4, 4),
        inputs=tensors("float32", shape=4, max_value=9, min_value=-9),
        compile=False,
        options=SearchOptions(examples=10),
    )
    assert {f.subject for f in run.findings} == {"Linear [float16, eager]", "Linear [bfloat16, eager]"}


def test_another_devices_policy_is_emulated() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, and uses it")
    run = assert_property(
        torch.nn.Linear(4, 4),
        inputs=tensors("float32", shape=4, max_value=9, min_value=-9),
        dtype="float16",
        device="cuda",
        compile=False,
        options=SearchOptions(examples=5),
    )
    assert {f.subject for f in run.findings} == {"Linear [float16, eager, cuda emulated]"}


def test_arguments_come_as_a_tensor_a_tuple_or_with_keywords() -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
        return (x + y) * by

    assert_property(lambda x: scaled(x, x), inputs=NARROW, compile=False, options=SearchOptions(examples=5))
    assert_property(scaled, inputs=st.tuples(NARROW, NARROW), compile=False, options=SearchOptions(examples=5))
    assert_property(
        scaled,
        inputs=st.tuples(st.tuples(NARROW), st.fixed_dictionaries({"y": NARROW, "by": st.just(0.5)})),
        compile=False,
        options=SearchOptions(examples=5),
    )


def test_it_works_inside_a_given_test_and_emits_its_run() -> None:
    from hypothesis import HealthCheck, given, settings

    seen = []

    @settings(max_examples=2, database=None, suppress_health_check=list(HealthCheck))  # nested_given is among them
    @given(st.sampled_from([torch.tanh, torch.sigmoid]))
    def inner(function: Any) -> None:
        seen.append(assert_property(function, inputs=NARROW, compile=False, options=SearchOptions(examples=3)))

    with collect() as runs:
        inner()
    assert runs == seen


# Directed: what is declared, and what is left of the format -------------------------------------------------------


class Growing(torch.nn.Module):
    """Its largest activation is 100 times the square of its largest input."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.square = Square(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.square(x) / 1000


class Square(torch.nn.Module):
    """factor * x * x."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x * self.factor


def test_the_headroom_that_is_left_is_told_with_the_module() -> None:
    run = assert_property(
        Growing(412.0),
        inputs=tensors("float16", shape=3, min_value=-10, max_value=10),
        compile=False,
        options=SearchOptions(domain=(-10, 10)),
    )
    (found,) = (f for f in run.findings if f.check == "headroom")
    assert found.verdict is Verdict.WARN
    assert found.where.module == "square"
    assert (
        "within |x| <= 10 the largest value found is 41,216 at square; 1.6x below the maximum of float16"
        in found.message
    )


def test_gradient_ascent_climbs_to_an_overflow_that_drawing_misses_and_makes_it_small() -> None:
    """Only where all of sixteen inputs are large at once does the product overflow."""
    inputs = tensors("float16", shape=16, elements=st.sampled_from([0.5, 1.0, 1.5]))

    def product(x: torch.Tensor) -> torch.Tensor:
        return x.square().sum() * 70 / 1000

    run = failing(product, inputs=inputs, domain=(-10.0, 10.0), examples=20)
    (finding,) = run.of(Verdict.FAIL)
    assert finding.check == "property-finite"
    assert "element 0 of the output is inf" in finding.message
    assert not assert_property(product, inputs=inputs, compile=False, options=SearchOptions(examples=20)).failed


# Invariances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "invariance"),
    [
        (stable_softmax, Shift(2.0)),
        (lambda x: torch.nn.functional.normalize(x + 5, dim=-1), BatchOrder()),
        (lambda x: x.amax(-1), Scale(2.0, degree=1.0)),
        (lambda x: x.sum(-1), Padding(dim=-1, count=2)),
        (torch.tanh, Declared("odd", lambda x: ((-x,), {}), lambda y: -y)),
    ],
    ids="shift order scale padding own".split(),
)
def test_an_invariance_that_holds_passes(function: Any, invariance: Any) -> None:
    run = assert_property(
        function, inputs=NARROW, invariances=(invariance,), compile=False, options=SearchOptions(examples=15)
    )
    (found,) = (f for f in run.findings if f.check == "property-invariance")
    assert found.verdict is Verdict.PASS
    assert invariance.name in found.message


def test_one_that_float64_does_not_have_fails_as_such() -> None:
    run = failing(torch.tanh, inputs=NARROW, invariances=(Shift(1.0),), examples=15)
    (finding,) = run.of(Verdict.FAIL)
    assert finding.check == "property-invariance"
    assert "does not hold in float64 either" in finding.message


def test_one_that_low_precision_loses_fails() -> None:
    """Softmax is free of shifts; without subtracting the largest it overflows twelve further up."""
    run = failing(softmax, inputs=NARROW, invariances=(Shift(12.0),), examples=15)
    (finding,) = run.of(Verdict.FAIL)
    assert finding.check == "property-invariance"
    assert "shift by 12: nonfinite" in finding.message


# Written down -----------------------------------------------------------------------------------------------------

MENDED = "    e = (x - x.amax(-1, keepdim=True)).exp()\n    return e / e.sum(-1, keepdim=True)\n"


@pytest.mark.usefixtures("warm_processes")
def test_a_failure_is_written_as_a_test_that_fails_until_the_function_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = tmp_path / "functions.py"
    functions.write_text(
        "import torch\n\n\ndef my_softmax(x):\n    e = x.exp()\n    return e / e.sum(-1, keepdim=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    my_softmax = importlib.import_module("functions").my_softmax
    failing(my_softmax, inputs=tensors("float16", shape=2, max_value=100), reproduce=tmp_path / "found")
    (written,) = (tmp_path / "found").glob("test_*.py")
    assert written.name == "test_my_softmax_float16_nonfinite.py"
    assert "torch.tensor(" in written.read_text()
    assert str(tmp_path) not in written.read_text()
    alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(written)]
    process = subprocess.run(alone, cwd=tmp_path / "found", capture_output=True, text=True, check=False)
    assert "1 failed" in process.stdout, process.stdout + process.stderr
    functions.write_text("import torch\n\n\ndef my_softmax(x):\n" + MENDED)
    del sys.modules["functions"]
    (test,) = (value for name, value in runpy.run_path(str(written)).items() if name.startswith("test_"))
    test()  # raises nothing any more
    del sys.modules["functions"]


def test_a_module_and_a_large_example_are_saved_beside_it(tmp_path: Path) -> None:
    model = Growing(100.0)
    run = failing(
        model, inputs=tensors("float16", shape=300, min_value=-100, max_value=100), examples=20, reproduce=tmp_path
    )
    assert {path.suffix for path in tmp_path.iterdir()} == {".py", ".pt"}
    assert "run pytest" in run.of(Verdict.FAIL)[0].hint


def test_what_cannot_be_named_in_a_file_is_told(tmp_path: Path) -> None:
    run = failing(lambda x: softmax(x), inputs=WIDE, examples=20, reproduce=tmp_path)
    assert "no test was written: the function cannot be imported by name" in run.of(Verdict.FAIL)[0].hint
    assert list(tmp_path.iterdir()) == []


# Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"model": 3}, "needs a module or a function"),
        ({"inputs": torch.zeros(3)}, "must be a Hypothesis strategy"),
        ({"inputs": st.nothing()}, "can draw from"),
        ({"dtype": "float64"}, "must be one of float16, bfloat16"),
        ({"dtype": "bfloat16"}, "judged in that alone"),
        ({"domain": (1.0, 1.0)}, "low < high"),
        ({"examples": 0}, "examples must be a whole number"),
        ({"seconds": math.nan}, "seconds must be"),
        ({"device": "abacus"}, "'abacus'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused_in_one_sentence(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        search(**{"model": torch.tanh, "inputs": NARROW, **arguments})
    assert "\n" not in str(caught.value)


def test_the_name_is_public() -> None:
    assert ampcheck.assert_property is assert_property
