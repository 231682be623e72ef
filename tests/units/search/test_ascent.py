"""Ascent stays inside the declared domain, and inside what the inputs can hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampcheck import assert_property
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject
from ampcheck.parity.example import Example
from ampcheck.search import SearchOptions
from ampcheck.search.ascent import climb
from ampcheck.search.runner import Runner
from ampcheck.strategies import tensors


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def reached(dtype: torch.dtype, low: float, high: float) -> list[torch.Tensor]:
    """What ascent passes from 1 on."""
    start = torch.ones(2, dtype=dtype)
    runner = Runner(Subject((double, (start,))), dtype, native=True)
    domains = dict.fromkeys(Example((start,)).floats(), (low, high))
    return [example.args[0] for example in climb(runner, Example((start,)), domains, lambda: False)]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from((torch.float16, torch.bfloat16)),
    st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=2).map(sorted),
)
def test_no_domain_is_too_wide_for_the_inputs(dtype: torch.dtype, ends: list[float]) -> None:
    steps = reached(dtype, *ends)
    assert steps
    assert all(bool(x.isfinite().all()) and x.dtype is dtype for x in steps)


def test_the_steps_are_those_of_what_is_left_of_the_domain() -> None:
    most = torch.finfo(torch.float16).max
    here, there = reached(torch.float16, -1e300, 1e300), reached(torch.float16, -most, most)
    assert [x.tolist() for x in here] == [x.tolist() for x in there]
    assert float(here[-1][0]) == most
    assert float(reached(torch.float16, -math.inf, 8.0)[-1][0]) == 8


@pytest.mark.parametrize(("dtype", "most"), [("float16", 1e6), ("bfloat16", 1e39)])
def test_a_property_holds_in_a_domain_beyond_the_format(dtype: str, most: float) -> None:
    inputs = tensors(dtype, shape=2, min_value=-4, max_value=4)
    run = assert_property(
        lambda x: x * 0.5, inputs=inputs, compile=False, options=SearchOptions(domain=(-most, most), examples=5)
    )
    assert not run.of(Verdict.FAIL)
