"""Casts to 8 bits are judged: those that cut values off fail, those that are scaled pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
@pytest.mark.parametrize("times", [1.05, 1.2, 10.0])
def test_code_that_clamps_means_it_as_long_as_it_takes_no_more_than_a_rounding(
    dtype: torch.dtype, times: float
) -> None:
    found = [f.where.op for f in _cast(TOP[dtype] * times, dtype, clamped=True).of(Verdict.FAIL)]
    assert found == (["aten::clamp"] if times > 1.1 else [])


def test_values_just_beyond_the_largest_number_are_rounded_and_not_cut_off() -> None:
    """Block scales that are powers of two leave values up to 512 for a format that ends at 448."""
    assert _cast(511.0, E4M3).failed is not SATURATES


@DTYPES
def test_every_cast_to_8_bits_is_followed_and_judged(dtype: torch.dtype) -> None:
    with Shadow() as shadow:
        (torch.tensor([2.0, 1e6]).to(dtype).float() * 2).to(dtype)
    assert not shadow.unruled


class _Cast(torch.autograd.Function):
    """A matrix product whose backward pass casts the gradient that comes in, as 8-bit training does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cast = cast
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = ctx.cast(gradient)
        return gradient @ weight, gradient.T @ x, None


class _Layers(nn.Module):
    """Layers that cast their gradients, before one that does not; `size` is that of the outputs."""

    def __init__(self, cast: Callable[[Tensor], Tensor], size: float = 1.0, layers: int = 1) -> None:
        super().__init__()
        self.cast, self.size = cast, size
        self.weights = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(layers))
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(_Cast.apply(x, weight, self.cast))  # type: ignore[no-untyped-call]
        y: Tensor = self.head(x) * self.size
        return y


def _judged(cast: Callable[[Tensor], Tensor], size: float = 1.0, layers: int = 1) -> Run:
    torch.manual_seed(0)
    return audit((_Layers(cast, size, layers).bfloat16(), (torch.randn(128, 64).bfloat16(),)), compile=False)


def _scaled(dtype: torch.dtype, dim: tuple[int, ...], *, off: float = 1.0) -> Callable[[Tensor], Tensor]:
    def cast(x: Tensor) -> Tensor:
        scale = off * TOP[dtype] / x.float().abs().amax(dim, keepdim=True).clamp(min=1e-30)
        return ((x.float() * scale).to(dtype).float() / scale).to(x.dtype)

    return cast


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


SIZE = {E4M3: 1e-2, E5M2: 1e-5}
"""Sizes of outputs whose gradients a format has no numbers for."""


@DTYPES
@pytest.mark.parametrize("layers", [1, 6])
def test_gradients_that_are_zero_after_a_cast_vanish(dtype: torch.dtype, layers: int) -> None:
    (found,) = [f for f in _judged(_plain(dtype), SIZE[dtype], layers).of(Verdict.FAIL) if f.check == "silent-zero"]
    assert (found.where.phase, found.where.op) == ("backward", "aten::_to_copy")
    assert "all results" in found.message
    assert f"weights.{layers - 1}" in found.message
    assert "largest magnitude" in found.hint


def test_a_cast_that_leaves_few_gradients_is_a_flush() -> None:
    def cast(x: Tensor) -> Tensor:  # at most a tenth of the elements is left
        scale = 2.0**-9 / (4 * x.float().std())
        return ((x.float() * scale).to(E4M3).float() / scale).to(x.dtype)

    (found,) = [f for f in _judged(cast).of(Verdict.FAIL) if f.check == "flush"]
    assert (found.where.phase, found.where.op) == ("backward", "aten::_to_copy")


@DTYPES
@pytest.mark.parametrize("dim", [(0, 1), (1,)], ids=["tensor", "rows"])
@pytest.mark.parametrize("off", [1.0, 0.25, 2.0**-6], ids=["just", "delayed", "far below"])
@pytest.mark.parametrize("layers", [1, 6])
def test_scaled_gradients_pass(dtype: torch.dtype, dim: tuple[int, ...], off: float, layers: int) -> None:
    assert not _judged(_scaled(dtype, dim, off=off), SIZE[dtype], layers).failed


def _quantised(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = (TOP[dtype] / x.detach().abs().amax().float()).to(x.dtype)
    return (x * scale).to(dtype).to(x.dtype) / scale


class _Trained(nn.Module):
    """Quantisation that training is aware of."""

    def __init__(self, dtype: torch.dtype, *, straight: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 16)
        self.dtype, self.straight = dtype, straight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        q = _quantised(x, self.dtype)
        y: Tensor = self.second(x + (q - x).detach() if self.straight else q) * 1e-3
        return y


@DTYPES
@pytest.mark.parametrize("straight", [False, True])
def test_a_fake_quantiser_needs_a_straight_way_for_gradients(dtype: torch.dtype, straight: bool) -> None:
    torch.manual_seed(0)
    run = audit((_Trained(dtype, straight=straight).bfloat16(), (torch.randn(128, 32).bfloat16(),)), compile=False)
    assert bool({f.check for f in run.of(Verdict.FAIL)} & {"flush", "silent-zero"}) is not straight


def test_what_vanishes_in_8_bits_and_reaches_nothing_passes() -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()

    def shifted() -> Tensor:
        small = (x * 1e-5).to(E4M3).to(x.dtype)  # float64 has it, and the sum does not show it
        return x + 3 + small

    assert not audit(shifted).failed


@DTYPES
def test_rows_that_are_nothing_beside_the_others_pass_under_a_scale_of_the_tensor(dtype: torch.dtype) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3] *= 1e-6 if dtype is E4M3 else 1e-11

    def project() -> Tensor:
        return _scaled(dtype, (0, 1))(x).sum(0)

    assert not audit(project).failed


@DTYPES
@pytest.mark.parametrize("large", [1, 8], ids=["one large row", "half of the rows"])
def test_rows_that_vanish_beside_a_few_large_ones_are_a_flush(dtype: torch.dtype, large: int) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:large] *= 1e7 if dtype is E4M3 else 1e12

    def project() -> Tensor:
        return _scaled(dtype, (0, 1))(x)[large:].sum(0)

    assert [f.check for f in audit(project).of(Verdict.FAIL)] == ["flush"]


def test_weights_of_the_usual_size_pass_without_a_scale() -> None:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert not audit(lambda: x @ weight.to(E4M3).to(x.dtype)).failed


@pytest.mark.parametrize("dead", ["relu", "zeros"])
def test_gradients_that_are_zero_in_float64_pass(dead: str) -> None:
    def cast(x: Tensor) -> Tensor:
        x = torch.relu(-x.abs() - 1) if dead == "relu" else x * 0
        return x.to(E4M3).to(x.dtype)

    assert not _judged(cast).failed
