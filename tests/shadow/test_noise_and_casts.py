"""Casts that drop an imaginary part, and casts between any dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from ampcheck.audit import audit
from ampcheck.core.run import Verdict
from ampcheck.shadow import Shadow

FORMATS = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def _failed(function: Callable[[], object]) -> set[str]:
    """The checks that fail or warn in a run of the function."""

    def run() -> object:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function()

    return {f.check for f in audit(run).findings if f.verdict in (Verdict.FAIL, Verdict.WARN)}


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
