"""What the bound must not explain, and decisions that rounding does explain: each once passed, or failed, wrongly."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
from searches import kinds

Function = Callable[..., Any]


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 1000), (torch.float16, 3000)], ids=str)
def test_a_sum_that_stops_growing_is_no_rounding(dtype: torch.dtype, count: int) -> None:
    """One by one, ones add up to 256 in bfloat16 and to 2048 in float16, however many there are."""
    assert kinds(lambda x: reduce(add, x.unbind(-1)) / count, torch.ones(count, dtype=dtype)) == ["accuracy"]


def test_an_update_that_never_arrives_is_no_rounding() -> None:
    """64 steps of 1e-3 that each round to nothing beside a weight of 1; what was learned is 0.064."""

    def learned(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        start = w
        for _ in range(64):
            w = w + 1e-3 * v
        return w - start

    one = torch.ones(1, dtype=torch.bfloat16)
    assert kinds(learned, one, one.clone()) == ["accuracy"]


def test_an_integer_beyond_what_moved_data_give_is_wrong() -> None:
    x = torch.tensor([11.5], dtype=torch.float16)
    assert kinds(lambda x: (x.exp() * 3.3).to(torch.int32), x) == ["decision"]


def test_an_integer_between_what_moved_data_give_is_honest() -> None:
    assert kinds(lambda x: (x * 7.7).to(torch.int32), torch.tensor([0.3, 30.0, 300.0], dtype=torch.float16)) == []


def test_an_excused_overflow_hides_no_other_output() -> None:
    def mixed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[0] * 0.5137 * 1.9463, (x[1] + 1000) - 1000

    x = torch.tensor([65504.0, 0.3], dtype=torch.float16)
    assert x[0] * 0.5137 * 1.9463 == torch.inf
    assert x[0].double() * 0.5137 * 1.9463 < 65520
    assert kinds(mixed, x) == ["accuracy"]


def test_an_undefined_element_hides_no_other() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[0].log(), (x[1] + 1000) - 1000])

    assert kinds(mixed, torch.tensor([-1.0, 0.3], dtype=torch.float16)) == ["accuracy"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_shape_that_moved_data_give_as_well_is_honest(dtype: torch.dtype) -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        y = x * 0.1
        return y[y > 0.3]

    assert [kinds(chosen, torch.tensor([x]), dtype=dtype) for x in (5.0, 3.0)] == [[], []]


def test_a_shape_that_no_rounding_gives_is_another_decision() -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        y = (x + 2048) - 2048
        return y[y > 0.1]

    assert kinds(chosen, torch.tensor([0.5], dtype=torch.float16)) == ["decision"]


def test_a_decision_about_a_subnormal_number_may_see_zero() -> None:
    assert kinds(lambda x: (x * 0.3) > 0, torch.tensor([6e-8], dtype=torch.float16)) == []
    assert kinds(lambda x: (x * 1e-6) > 0, torch.tensor([0.01], dtype=torch.float16)) == ["decision"]


TINY = 2.0**-128
"""Subnormal in bfloat16 and in float32: some kernels and devices take it for zero."""


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.nn.functional.conv1d, (torch.full((1, 2, 7), 43.0), torch.full((3, 2, 3), TINY))),
        (torch.fmod, (torch.ones(2, 40), torch.full((2, 40), -TINY))),
        (torch.nn.functional.instance_norm, (torch.nn.functional.pad(torch.full((1, 2, 1), TINY), (2, 0)),)),
        (lambda x: (x * 2.0**100 > 0).long(), (torch.full((40,), TINY),)),
    ],
    ids=["conv1d", "fmod", "instance_norm", "decision"],
)
def test_a_kernel_that_takes_subnormals_of_float32_for_zero_is_honest(function: Function, args: Any) -> None:
    assert kinds(function, *(one.to(torch.bfloat16) for one in args)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_subnormals_that_share_memory_are_judged(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.finfo(dtype).tiny / 2, 1.0], dtype=dtype)
    assert kinds(lambda x: x * 2, x.expand(3, 2)) == []


def test_subnormals_of_float16_are_none_of_float32_and_must_count() -> None:
    x = torch.full((40,), 2.0**-20, dtype=torch.float16)
    assert kinds(lambda x: (x * x).sqrt() * 2.0**14, x) == ["accuracy"]


def test_a_norm_may_keep_its_mean_in_the_format_of_its_input() -> None:
    x = torch.zeros(2, 4, 3, dtype=torch.float16)
    x[1, 3, 2] = -4e-7
    assert kinds(torch.nn.functional.instance_norm, x) == []


def test_a_score_that_hangs_on_several_close_decisions_is_honest() -> None:
    """0.3 rounds up and 0.1 down in float16: one pattern of roundings in sixteen gives the score."""

    def score(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        above = [(x[i] * 0.3).float() > 0.30001 for i in (0, 2)]
        below = [(x[i] * 0.1).float() < 0.09999 for i in (1, 3)]
        decided = torch.stack([*above, *below])
        return decided.all().to(x.dtype) * 0.5, decided

    x = torch.ones(4, dtype=torch.float16)
    assert float(score(x)[0]) == 0.5
    assert float(score(x.double())[0]) == 0
    assert kinds(score, x) == []
    assert kinds(lambda x: (score(x)[0] + (x * 2048 + 1).sum() - (x * 2048).sum(), score(x)[1]), x) == ["accuracy"]
