"""Draws of which integers are made, noise that rounding takes away, and casts that drop an imaginary part."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from ampcheck.audit import audit
from ampcheck.core.run import Verdict
from ampcheck.shadow import Shadow

FORMATS = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
Function = Callable[[torch.dtype], object]


def _failed(function: Callable[[], object]) -> set[str]:
    """The checks that fail or warn in a run of the function."""

    def run() -> object:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function()

    return {f.check for f in audit(run).findings if f.verdict in (Verdict.FAIL, Verdict.WARN)}


def _range(dtype: torch.dtype) -> int:
    """Twice as many integers as steps of the format lie between 1/2 and 1."""
    return round(4 / torch.finfo(dtype).eps)


def _of_a_wider_copy(dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(64, dtype=dtype).float() * _range(dtype)).long()


def _of_a_factor_that_is_a_tensor(dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(8, 8, dtype=dtype).double() * torch.tensor(float(_range(dtype)))).floor().int()


def _of_a_range(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(64, dtype=dtype).uniform_(-1, 1).float().add(1).mul_(_range(dtype)).round().to(torch.int32)


def _of_a_view(dtype: torch.dtype) -> torch.Tensor:
    return torch.rand_like(torch.zeros(64, dtype=dtype))[:, None].float().mul(_range(dtype) - 1).ceil().long()


@FORMATS
@pytest.mark.parametrize("function", [_of_a_wider_copy, _of_a_factor_that_is_a_tensor, _of_a_range, _of_a_view])
def test_integers_that_a_draw_never_reaches_are_found(function: Function, low: torch.dtype) -> None:
    assert _failed(lambda: function(low)) == {"integer-cast"}


def test_a_draw_of_float32_reaches_them() -> None:
    assert not _failed(lambda: (torch.rand(64) * 4096).long())
    assert not _failed(lambda: torch.empty(64).uniform_(-1, 1).add(1).mul_(8192).round().int())


@FORMATS
def test_a_draw_that_reaches_nearly_all_integers_of_its_range_is_silent(low: torch.dtype) -> None:
    for count in (2, 10, round(1 / torch.finfo(low).eps)):
        assert not _failed(lambda count=count: (torch.rand(999, dtype=low).float() * count).long()), count
    assert not _failed(lambda: (torch.rand(99, dtype=low) < 0.5).long())
    assert not _failed(lambda: (torch.rand(99, dtype=low).float() * 1e4).sin())


GREY = torch.arange(0, 256, dtype=torch.uint8)
LEVELS = {torch.bfloat16: GREY.long() % 128 + 128, torch.float16: GREY.long() + 1024}


def _uniform(dtype: torch.dtype) -> torch.Tensor:
    return LEVELS[dtype].to(dtype) + torch.rand(256, dtype=dtype)


def _of_float32(dtype: torch.dtype) -> torch.Tensor:
    return LEVELS[dtype].to(dtype) - torch.rand(256).to(dtype)


def _scaled(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(256).mul(0.2).to(dtype) * torch.ones(256, dtype=dtype) + LEVELS[dtype].to(dtype)


def _in_place(dtype: torch.dtype) -> torch.Tensor:
    return LEVELS[dtype].to(dtype).add_(torch.rand(256, dtype=dtype) - 0.5)


@FORMATS
@pytest.mark.parametrize("function", [_uniform, _of_float32, _scaled, _in_place])
def test_noise_between_whole_numbers_that_rounding_takes_away_is_found(function: Function, low: torch.dtype) -> None:
    assert "precision-loss" in _failed(lambda: function(low))


@pytest.mark.every(2)
@FORMATS
def test_noise_that_remains_or_is_wider_than_the_gaps_is_silent(low: torch.dtype) -> None:
    levels, small = LEVELS[low], torch.arange(64).repeat(4)
    honest: list[Callable[[], object]] = [
        lambda: (levels + torch.rand(256)).to(low),
        lambda: small.to(low) + torch.rand(256, dtype=low),
        lambda: levels.to(low) + 20 * torch.randn(256, dtype=low),
        lambda: levels.to(low) / 256 + torch.rand(256, dtype=low) / 256,
        lambda: levels.to(low) + (torch.rand(256, dtype=low) > 0.5).to(low),
        lambda: torch.randn(256).to(low) * 300 + torch.rand(256, dtype=low),
        lambda: levels.to(low) + levels.flip(0).to(low) / 999,
    ]
    for number, function in enumerate(honest):
        assert "precision-loss" not in _failed(function), number


class Kernel(torch.nn.Module):
    def __init__(self, *, buffer: bool = False, real: bool = False) -> None:
        super().__init__()
        c = torch.randn(8, dtype=torch.complex64) * (1 if not real else 0) + torch.randn(8)
        self.c = torch.nn.Buffer(c) if buffer else torch.nn.Parameter(c)
        self.out = torch.nn.Linear(8, 2)


@FORMATS
@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "parameter"])
def test_a_module_that_loses_the_imaginary_part_of_its_weights_is_found(low: torch.dtype, buffer: bool) -> None:
    assert "precision-loss" in _failed(lambda: Kernel(buffer=buffer).to(low).c.float())


def test_a_complex_parameter_that_is_cast_where_it_is_used_is_found() -> None:
    assert "precision-loss" in _failed(lambda: Kernel().c.to(torch.float32) * torch.ones(8))


@pytest.mark.every(2)
@FORMATS
def test_a_cast_that_drops_no_imaginary_part_is_silent(low: torch.dtype) -> None:
    x = torch.randn(8, 64)
    honest: list[Callable[[], object]] = [
        lambda: Kernel().to(torch.complex128).c.real.float(),
        lambda: Kernel(real=True).to(low).c.float(),
        lambda: torch.fft.ifft(torch.fft.fft(x)).to(low).float(),
        lambda: torch.fft.ifft(torch.fft.fft(x) * torch.linspace(0, 1, 64)).to(torch.float32),  # its real part is meant
        lambda: Kernel().c.real.to(low).float(),
        lambda: torch.view_as_real(Kernel().c).to(low).float(),
    ]
    for number, function in enumerate(honest):
        assert "precision-loss" not in _failed(function), number
    if low is torch.bfloat16:
        assert "precision-loss" not in _failed(lambda: Kernel().bfloat16().out.weight.float())


_DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)


@pytest.mark.parametrize("source", _DTYPES, ids=str)
def test_a_cast_between_any_dtypes_is_judged(source: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1]).to(source)
    with Shadow() as shadow, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of an imaginary part that is dropped
        for dtype in _DTYPES:
            values.to(dtype)
    assert not shadow.unruled
