"""What a search must not hide and must not invent: a model's casts, luck, kernels that lack, ties, spent budgets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from searches import evaluator, kinds, look, search

from ampcheck.core.run import Run, Verdict, collect
from ampcheck.parity.example import Example
from ampcheck.search import BatchOrder, Scale, Shift
from ampcheck.strategies import tensors

HALF = tensors("float16", shape=3, min_value=-4, max_value=4)
FLOAT = tensors("float32", shape=3, min_value=-4, max_value=4)


def searched(model: Callable[..., Any], inputs: Any = HALF, examples: int = 80, **options: Any) -> Run:
    """The run of a search, whatever came out."""
    with collect() as runs, suppress(AssertionError):
        search(model, inputs, examples=examples, **options)
    return runs[0]


def failing(run: Run) -> list[str]:
    return [finding.check for finding in run.of(Verdict.FAIL)]


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16], ids=str)
def test_the_judge_does_not_share_the_models_own_casts(cast: torch.dtype) -> None:
    assert failing(searched(lambda x: ((x.to(cast) + 1000) - 1000).float(), FLOAT, dtype="float16")) == [
        "property-accuracy"
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16], ids=str)
def test_a_cast_alone_is_a_rounding(cast: torch.dtype, dtype: str) -> None:
    assert failing(searched(lambda x: (x.to(cast) * 2).float(), FLOAT, dtype=dtype)) == []


def test_a_kernel_that_lacks_for_one_shape_excuses_no_other_error() -> None:
    def odd(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float16 and x.dim() == 1:
            raise RuntimeError("\"odd_cpu\" not implemented for 'Half'")
        if x.dtype is torch.float16:
            raise TypeError("two dtypes")
        return x * 2

    shapes = st.sampled_from([(2,), (2, 2)])
    assert failing(searched(odd, tensors("float16", shape=shapes))) == ["low-precision-error"]


def test_what_draws_from_numpy_draws_the_same_in_every_run() -> None:
    assert failing(searched(lambda x: x * (1 + np.random.rand()))) == []
    assert failing(searched(lambda x: ((x + 1000) - 1000) * (1 + np.random.rand()))) == ["property-accuracy"]


def test_what_differs_from_call_to_call_is_judged_by_its_own_run() -> None:
    ticks = iter(range(10**6))
    assert failing(searched(lambda x: x * (1 + next(ticks) % 7))) == []


def test_numbers_drawn_for_some_examples_alone_are_those_of_the_judge_and_the_users_stream_goes_on() -> None:
    def sometimes(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(3, dtype=x.dtype) if float(x.abs().sum()) > 1 else x

    before = torch.random.get_rng_state()
    assert failing(searched(sometimes)) == []
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_count_beside_tensors_may_depend_on_the_dtype() -> None:
    assert failing(searched(lambda x: (x * 2, x.nbytes, 10**30))) == []
    assert failing(searched(lambda x: (x * 2, {"sum": float((x + 1000).sum() - 3000)}))) == ["property-accuracy"]


@pytest.mark.parametrize(
    ("model", "invariance"),
    [(lambda x: x.argmax(), BatchOrder()), (lambda x: x.round().int(), Shift(1.0))],
    ids=["argmax", "round"],
)
def test_integers_are_held_to_an_invariance_too(model: Callable[..., Any], invariance: Any) -> None:
    assert failing(searched(model, invariances=(invariance,))) == ["property-invariance"]


def test_a_change_that_makes_numbers_equal_tells_nothing() -> None:
    x = torch.tensor([1e-20, 3e-20, 9e-20], dtype=torch.bfloat16)
    softmax = evaluator(lambda x: torch.nn.functional.softmax(x, -1), x, invariances=(Shift(1.0), BatchOrder()))
    standardised = evaluator(lambda x: x / x.std(), x, invariances=(Shift(1.0),))
    assert softmax.look(Example((x,))).problems == []
    assert "invariance" not in [problem.kind for problem in standardised.look(Example((x,))).problems]
    assert not standardised.counts
    assert not softmax.counts["shift by 1"]


def test_a_shift_that_always_swallows_the_data_is_no_evidence_of_an_invariance() -> None:
    inputs = st.integers(1, 9).map(lambda n: torch.tensor([1.0, 2.0, 3.0]) * n)
    (failed,) = searched(torch.tanh, inputs, dtype="float16", invariances=(Shift(1e30),)).of(Verdict.FAIL)
    assert failed.check == "property-invariance"
    assert "changed no input that could be judged" in failed.message


def test_two_changes_of_one_kind_are_told_apart() -> None:
    inputs = st.tuples(HALF, tensors("int64", shape=3))
    shifts = (Shift(1.0, 1.0, inputs=(0,)), Shift(1.0, 1.0, inputs=(1,)))
    (failed,) = searched(lambda x, n: x + n, inputs, invariances=shifts).of(Verdict.FAIL)
    assert "shift by 1 of inputs 1" in failed.message
    assert "changed no input" in failed.message


def test_inputs_that_overflow_when_they_change_are_not_looked_at() -> None:
    large = tensors("float16", shape=3, min_value=60000)
    run = searched(lambda x: x / x.abs().amax(), large, invariances=(Scale(4.0),))
    assert failing(run) == ["property-invariance"]
    assert "changed no input that could be judged" in run.of(Verdict.FAIL)[0].message


def test_a_quantiser_with_a_scale_of_its_own_is_honest() -> None:
    """A tie turns with the scale that was rounded, while nothing else moves."""

    def quantised(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 127
        return (x / scale).round().clamp(-128, 127) * scale

    generator = torch.Generator().manual_seed(0)
    drawn = [(torch.rand(3, 8, generator=generator) * 200 - 100).half() for _ in range(400)]
    assert [problem for x in drawn for problem in look(quantised, x).problems] == []


def test_a_norm_of_one_subnormal_number_is_honest_wherever_it_stands() -> None:
    for place in range(24):
        x = torch.zeros(24, dtype=torch.float16)
        x[place] = -6e-7
        assert kinds(torch.nn.functional.instance_norm, x.view(2, 4, 3)) == []


def test_the_seconds_are_kept_while_a_failure_is_made_smaller() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return (x * x).sum(-1)

    start = time.perf_counter()
    run = searched(slow, tensors("float16", shape=(6, 8)), examples=200, seconds=1.0)
    assert time.perf_counter() - start < 6  # 1.5 s, the first call, and what one example may take
    assert "making it smaller was cut short by the budget" in run.of(Verdict.FAIL)[0].message


SEEN: set[bytes] = set()  # what is global is not put back after each call


def noted(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float16:
        SEEN.add(x.numpy().tobytes())
    return x * 1.5


def test_examples_are_different_ones() -> None:
    SEEN.clear()
    run = searched(noted, tensors("float16", shape=2, min_value=-1, max_value=1), examples=100)
    assert len(SEEN) >= run.coverage.seen["examples"] > 80
    assert searched(noted, st.just(torch.ones(2).half()), examples=100).coverage.seen["examples"] == 1


def test_inputs_in_eight_bits_are_judged_where_the_model_widens_them() -> None:
    inputs = st.tuples(HALF, tensors("float8_e4m3fn", shape=3, min_value=-4, max_value=4))
    assert failing(searched(lambda x, y: ((x * y.to(x.dtype)) + 1000) - 1000, inputs)) == ["property-accuracy"]


def test_a_model_that_refuses_most_examples_is_a_warning() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 0.5:
            raise ValueError("too large")
        return x * 2

    inputs = tensors("float16", shape=1, elements=st.sampled_from([0.25, 1.0, 2.0, 3.0, 4.0]))
    (warned,) = searched(picky, inputs).of(Verdict.WARN)
    assert warned.check == "coverage"
    assert "too large" in warned.message


def test_a_large_example_does_not_bury_what_is_said_of_it() -> None:
    inputs = tensors("float16", shape=300, elements=st.sampled_from([65504.0, 65472.0, 60000.0]))
    (failed, *_) = searched(lambda x: x.cumsum(0), inputs).of(Verdict.FAIL)
    assert len(failed.message) < 1200
    assert math.isfinite(failed.observed or 0.0)
