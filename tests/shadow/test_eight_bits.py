"""Casts to 8 bits are judged: those that cut values off fail, those that are scaled pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ampcheck.audit import audit
from ampcheck.core.run import Run, Verdict
from ampcheck.shadow import Shadow

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOP = {E4M3: 448.0, E5M2: 57344.0}
SATURATES = bool(torch.tensor(1e6).to(E4M3).float().isfinite())
"""Whether a cast to e4m3fn gives the largest number for all beyond it; older releases give NaN."""
DTYPES = pytest.mark.parametrize("dtype", TOP, ids=str)


def _cast(largest: float, dtype: torch.dtype, *, scaled: bool = False, clamped: bool = False) -> Run:
    """Cast activations of about 1 with one channel of the largest number, in a callable."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 3] = largest
    weight = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).bfloat16()

    def project() -> Tensor:
        scale = x.abs().amax().float() / TOP[dtype] if scaled else torch.ones(())
        y = x.float() / scale
        y = (y.clamp(-TOP[dtype], TOP[dtype]) if clamped else y).to(dtype).float() * scale
        return y.to(x.dtype) @ weight

    return audit(project)


@DTYPES
@pytest.mark.parametrize("times", [1.3, 2.0, 100.0])
def test_a_cast_that_cuts_values_off_is_an_overflow_at_its_line(dtype: torch.dtype, times: float) -> None:
    (found,) = [f for f in _cast(TOP[dtype] * times, dtype).of(Verdict.FAIL) if f.check == "overflow"]
    assert found.where.op == "aten::_to_copy"
    assert f"{TOP[dtype]:g}" in found.message or dtype is E5M2 or not SATURATES


@DTYPES
@pytest.mark.parametrize("times", [0.5, 1.0, 1.03, 2.0, 100.0])
def test_a_scaled_cast_passes(dtype: torch.dtype, times: float) -> None:
    assert not _cast(TOP[dtype] * times, dtype, scaled=True).failed


@DTYPES
def test_code_that_clamps_means_it(dtype: torch.dtype) -> None:
    assert not _cast(TOP[dtype] * 10, dtype, clamped=True).failed


def test_values_just_beyond_the_largest_number_are_rounded_and_not_cut_off() -> None:
    """Block scales that are powers of two leave values up to 512 for a format that ends at 448."""
    assert _cast(511.0, E4M3).failed is not SATURATES


@DTYPES
def test_every_cast_to_8_bits_is_followed_and_judged(dtype: torch.dtype) -> None:
    with Shadow() as shadow:
        (torch.tensor([2.0, 1e6]).to(dtype).float() * 2).to(dtype)
    assert not shadow.unruled
