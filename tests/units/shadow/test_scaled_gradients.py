"""Gradients are judged as a whole, and so is what clipping and an optimizer's averages make of them."""

from collections.abc import Callable

import pytest
import torch

from ampcheck.shadow import Shadow

SMALL = 2.1e-7
"""Between 3 and 4 of the smallest numbers of float16: rows of this size have an error of a seventh."""


def clipped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.mul_(1 / (gradient.norm() + 1))


def clipped_in_a_list(gradient: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([gradient], 0.25)
    return gradient


def copied(gradient: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(gradient).copy_(gradient)


def averaged(gradient: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(gradient).lerp_(gradient, 0.1)


def momentum(gradient: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(gradient).mul_(0.9).add_(gradient)


def squared(gradient: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(gradient).mul_(0.99).addcmul_(gradient, gradient, value=0.01)


def judged(use: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> Shadow:
    """A shadow of what is made of a gradient of which seven rows in eight are that small."""
    torch.manual_seed(0)
    weight = torch.randn(8, 64, requires_grad=True)
    rows = torch.tensor([1.0, *[SMALL] * 7])
    with Shadow() as shadow:
        ((torch.randn(16, 64).half() @ weight.half().T).float() * rows).sum().backward()
        assert weight.grad is not None
        shadow.reach({"made": use(weight.grad.to(dtype))})
    return shadow


@pytest.mark.parametrize("use", [clipped, clipped_in_a_list, copied, averaged, momentum, squared])
def test_small_rows_of_gradients_are_no_fault_of_what_is_made_of_them(
    use: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert judged(use).faults == ()


def test_a_loss_of_small_rows_is_a_fault_of_what_is_no_gradient() -> None:
    torch.manual_seed(0)
    rows = torch.tensor([1.0, *[SMALL] * 7])[:, None]
    with Shadow() as shadow:
        value = (torch.ones(8, 64) * rows * (1 + torch.rand(8, 1))).half().float().mul_(0.5)
        shadow.reach({"made": value})
    assert [fault for fault in shadow.faults if fault.reaches]


def test_a_16_bit_average_that_no_longer_moves_is_a_fault() -> None:
    def stalls(gradient: torch.Tensor) -> torch.Tensor:
        average = gradient * 100
        for _ in range(32):
            average.add_(gradient, alpha=0.1)
        return average

    assert [fault for fault in judged(stalls, torch.bfloat16).faults if fault.reaches]
    assert judged(stalls).faults == ()
