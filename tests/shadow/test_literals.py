"""Numbers of Python and NumPy that enter a run in 16 bits are rounded there, as any other value is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ampcheck.audit import audit
from ampcheck.core.run import Verdict
from ampcheck.shadow import Shadow

HALF = (torch.float16, torch.bfloat16)

FACTORIES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "tensor": lambda like, number: torch.tensor(number, dtype=like.dtype),
    "as_tensor of a list": lambda like, number: torch.as_tensor([number], dtype=like.dtype),
    "new_tensor": lambda like, number: like.new_tensor(number),
    "tensor of an array": lambda like, number: torch.tensor(np.array([number]), dtype=like.dtype),
    "full": lambda like, number: torch.full((1,), number, dtype=like.dtype),
}

NUMBERS = st.one_of(st.floats(allow_nan=False), st.integers(-(2**63), 2**63 - 1), st.booleans())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@given(numbers=st.lists(NUMBERS, max_size=6))
def test_the_run_has_the_bits_that_it_has_without_a_shadow(numbers: list[float], dtype: torch.dtype) -> None:
    alone = torch.tensor(numbers, dtype=dtype)
    with Shadow():
        followed = torch.tensor(numbers, dtype=dtype)
    assert torch.equal(alone.view(torch.int16), followed.view(torch.int16))


def test_a_leaf_stays_one_and_memory_that_is_shared_stays_shared() -> None:
    array = np.ones(3, dtype=np.float16)
    with Shadow():
        weight = torch.tensor([0.1, 0.2], dtype=torch.float16, requires_grad=True)
        (weight * 2).sum().backward()
        shared = torch.as_tensor(array)
        array[0] = 5
    assert weight.is_leaf
    assert weight.grad is not None
    assert shared[0] == 5


@pytest.mark.parametrize("name", FACTORIES)
def test_an_eps_that_is_zero_in_float16_is_found_wherever_it_is_made(name: str) -> None:
    def normalise(dtype: torch.dtype) -> Callable[[], Tensor]:
        def block() -> Tensor:
            x = torch.ones(4, 8)
            x[2] = 0
            x = x.to(dtype)
            return x / (x.norm(dim=-1, keepdim=True) + FACTORIES[name](x, 1e-8))

        return block

    assert any(f.check == "silent-zero" for f in audit(normalise(torch.float16)).of(Verdict.FAIL))
    assert not audit(normalise(torch.bfloat16)).failed


def test_a_decay_that_rounds_to_one_is_found_and_one_in_float32_passes() -> None:
    def average(dtype: torch.dtype) -> Callable[[], Tensor]:
        def block() -> Tensor:
            value, decay = 1 + torch.linspace(0, 0.5, 16).to(dtype), torch.tensor(0.9995, dtype=dtype)
            mean = torch.zeros(16)
            for _ in range(20):
                mean = mean * decay + (1 - decay) * value
            return mean

        return block

    assert audit(average(torch.bfloat16)).failed
    assert not audit(average(torch.float32)).failed
