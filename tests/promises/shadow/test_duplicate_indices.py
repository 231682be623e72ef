"""Promise: where several elements go to one place they are added up, and the sum is judged like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ampcheck
from ampcheck import Verdict

ROWS = torch.arange(8000) % 4
"""Each of four rows is read 2000 times: a count that bfloat16 cannot reach by adding ones."""


def put(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(4, dtype=dtype).index_put((ROWS,), torch.ones(8000, dtype=dtype), accumulate=True)


def looked_up(dtype: torch.dtype, weight: float = 1.0) -> torch.Tensor:
    table = torch.ones(4, 8, dtype=dtype, requires_grad=True)
    (table[ROWS].float() * weight).sum().backward()
    assert table.grad is not None
    return table.grad


def assigned(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(4, dtype=dtype).index_put((torch.arange(4),), torch.full((4,), 0.3, dtype=dtype))


def failed(function: Callable[[], torch.Tensor], check: str) -> list[str]:
    run = ampcheck.audit(function, compile=False)
    return [found.message for found in run.findings if found.check == check and found.verdict is Verdict.FAIL]


@pytest.mark.parametrize("function", [put, looked_up])
def test_a_sum_over_equal_indices_that_loses_its_addends_is_found(function: Callable[..., torch.Tensor]) -> None:
    assert bool((function(torch.bfloat16) == 256).all())
    (message,) = failed(lambda: function(torch.bfloat16), "precision-loss")
    assert "index_put" in message
    assert not failed(lambda: function(torch.float32), "precision-loss")


def test_a_sum_over_equal_indices_that_overflows_is_found() -> None:
    (message,) = failed(lambda: looked_up(torch.float16, 40.0), "overflow")
    assert "index_put" in message
    assert not failed(lambda: looked_up(torch.float16), "overflow")


def test_values_that_are_only_put_in_their_places_are_not_judged() -> None:
    assert not failed(lambda: assigned(torch.bfloat16), "precision-loss")


def test_the_lost_digits_of_a_sum_are_not_those_of_the_loss() -> None:
    """A loss that nearly cancels leaves nothing of itself in the gradient that its ones begin."""
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0]).bfloat16()[:, None].expand(4, 8)
    rounded = torch.tensor(1.0 + 2**-7).bfloat16()

    def step() -> torch.Tensor:
        table = signs.clone()
        table[0, 0] = rounded
        table.requires_grad_()
        table[ROWS].float().sum().backward()
        assert table.grad is not None
        return table.grad

    (message,) = failed(step, "precision-loss")
    assert "index_put" in message
