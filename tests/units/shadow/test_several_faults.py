"""Promise: what overflows is found at its own line, whatever else went wrong before it or beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcheck.records.faults import OVERFLOW, ZERO
from ampcheck.shadow import Shadow


def _line() -> int:
    return sys._getframe(1).f_lineno


def _found(run: Callable[[], int]) -> set[tuple[str, int]]:
    with Shadow() as shadow:
        line = run()
    return {(fault.kind, (fault.where.line or 0) - line) for fault in shadow.faults if fault.reaches}


def test_an_overflow_of_an_earlier_fault_has_no_line_of_its_own() -> None:
    def run() -> int:
        x = torch.tensor([2.0, 3.0, 1.0]).half()
        vanished = x * 1e-9
        large = (vanished * 1e9).reciprocal()
        assert large.isinf().all()
        return _line() - 3

    assert {line for _, line in _found(run)} == {0}


def test_of_zero_by_zero_the_denominator_is_named() -> None:
    def run() -> int:
        x = torch.tensor([0.0, 1.0, 2.0]).half().requires_grad_()
        distance = (x.square() + 1e-8).sqrt()
        distance.float().square().mean().backward()
        assert x.grad is not None
        assert x.grad[0].isnan()
        return _line() - 4

    found = _found(run)
    assert (ZERO, 0) in found
    assert {line for _, line in found} == {0}


@pytest.mark.parametrize("hooked", [False, True])
def test_an_overflow_in_a_backward_by_hand_has_the_line_that_computes_it(hooked: bool) -> None:
    class Enlarge(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
            return gradient * 1e6

    def enlarge(gradient: Tensor) -> Tensor:
        return gradient * 1e6

    def run() -> int:
        x = torch.randn(8).half().requires_grad_()
        doubled = x * 2
        if hooked:
            doubled.register_hook(enlarge)
        else:
            doubled = Enlarge.apply(doubled)
        doubled.float().square().sum().backward()
        return (enlarge if hooked else Enlarge.backward).__code__.co_firstlineno + (1 if hooked else 2)

    assert (OVERFLOW, 0) in _found(run)


def test_a_cast_that_overflows_has_no_more_lost_elements_than_results() -> None:
    """The lowest value of a row, in float16, takes the whole row with it."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    x[2, 5] = -90000.0
    with Shadow() as shadow:
        zero = x.amin(-1, keepdim=True).half()
        y = (x - zero) * 0.5
    del y
    (cast,) = [fault for fault in shadow.faults if fault.kind == OVERFLOW and fault.where.op == "aten::_to_copy"]
    assert (cast.examination.lost, cast.examination.numel) == (1, 6)
