"""Casts to 16 bits and `torch.finfo` inside a model do not mislead the judge."""

from __future__ import annotations

import pytest
import torch
from searches import kinds


def softmax_in_half(x: torch.Tensor) -> torch.Tensor:
    e = x.half().exp()
    return e / e.sum()


def guarded(x: torch.Tensor) -> torch.Tensor:
    return x / (x.abs().amax() + torch.finfo(x.dtype).eps)


def masked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x > 0, torch.finfo(x.dtype).min)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_cast_to_half_that_overflows_is_seen(dtype: torch.dtype) -> None:
    assert kinds(softmax_in_half, torch.tensor([12.0, 1.0]), dtype=dtype) == ["nonfinite"]
    assert kinds(softmax_in_half, torch.tensor([3.0, 1.0]), dtype=dtype) == []


def test_what_is_infinite_without_the_cast_too_is_undefined() -> None:
    assert kinds(lambda x: x.half().log().float(), torch.tensor([0.0, 1.0]), dtype=torch.float16) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_largest_number_of_the_format_is_a_mask_and_its_eps_is_judged(dtype: torch.dtype) -> None:
    """A guard of 0.0078, the eps of bfloat16, replaces what it guards."""
    small = torch.tensor([1e-4, -2e-4], dtype=dtype)
    assert kinds(masked, small) == []
    assert kinds(guarded, small) == ["accuracy"]
    assert kinds(guarded, 1e4 * small) == []


def test_finfo_is_torchs_own_again() -> None:
    before = torch.finfo
    kinds(guarded, torch.ones(2, dtype=torch.float16))
    assert torch.finfo is before
    assert torch.finfo(torch.float64).eps == 2.0**-52
