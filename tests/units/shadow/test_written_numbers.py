"""Numbers that are written in 16 bits are rounded like any other value, and nothing else of the run changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
NUMBERS = st.one_of(st.floats(width=64), st.integers(-(2**60), 2**60), st.booleans())
WRITTEN: dict[str, Callable[[Any, torch.dtype], Tensor]] = {
    "tensor": lambda data, dtype: torch.tensor(data, dtype=dtype),
    "as_tensor": lambda data, dtype: torch.as_tensor(data, dtype=dtype),
    "asarray": lambda data, dtype: torch.asarray(data, dtype=dtype),
    "new_tensor": lambda data, dtype: torch.zeros((), dtype=dtype).new_tensor(data),
    "array": lambda data, dtype: torch.tensor(np.asarray(data, dtype=np.float64), dtype=dtype),
}


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@given(data=st.lists(NUMBERS, min_size=1, max_size=5))
def test_values_are_those_of_the_call_and_their_companions_the_numbers(
    write: Callable[[Any, torch.dtype], Tensor], dtype: torch.dtype, data: list[float]
) -> None:
    try:
        plain = write(data, dtype)
    except (RuntimeError, OverflowError) as error:
        with Shadow(), pytest.raises(type(error)):
            write(data, dtype)
        return
    with Shadow() as shadow:
        seen = write(data, dtype)
    assert seen.dtype is dtype
    assert seen.is_leaf
    torch.testing.assert_close(seen, plain, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(shadow.exact(seen), torch.tensor(data, dtype=torch.float64), equal_nan=True)


def test_what_a_format_holds_exactly_keeps_its_memory() -> None:
    array = np.array([0.5, 2.0], dtype=np.float16)
    with Shadow():
        shared = torch.as_tensor(array)
    array[0] = 4.0
    assert shared[0] == 4.0


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_number_that_requires_a_gradient_is_a_leaf(dtype: torch.dtype) -> None:
    with Shadow():
        scale = torch.tensor(0.1, dtype=dtype, requires_grad=True)
        (scale * 3).backward()
    assert scale.is_leaf
    assert scale.grad == 3


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_an_eps_that_float16_cannot_hold_is_found_where_it_is_written(
    write: Callable[[Any, torch.dtype], Tensor],
) -> None:
    x = torch.zeros(4, 8).half()

    def normalise(eps: float = 1e-8) -> Tensor:
        return x / (x.sum(-1, keepdim=True) + write(eps, torch.float16))

    found = audit(normalise).of(Verdict.FAIL)
    assert "silent-zero" in {finding.check for finding in found}
    assert not audit(lambda: normalise(1e-4)).failed


def test_positions_that_bfloat16_rounds_are_found_and_small_ones_pass() -> None:
    x = torch.rand(4, 16).bfloat16()

    def rotate(first: int) -> Tensor:
        return x * torch.cos(x.new_tensor([first + i for i in range(16)]))

    assert audit(lambda: rotate(1001)).failed
    assert not audit(lambda: rotate(0)).failed


def test_scales_and_masks_as_users_write_them_pass() -> None:
    x = torch.randn(3, 8).half()

    def normalise() -> Tensor:
        mean, std = (torch.tensor(v, dtype=x.dtype) for v in ([0.485, 0.456] * 4, [0.229, 0.224] * 4))
        scores = torch.where(x > 0, x, torch.tensor(-6.5e4, dtype=x.dtype))
        return torch.softmax(scores, -1) + (x - mean) / std

    assert not audit(normalise).failed


@pytest.mark.parametrize("warm", [False, True])
def test_device_contexts_scripts_and_export_work_inside_and_after(warm: bool) -> None:
    """In a new process: PyTorch makes its tables of functions when it first needs them, which may be inside."""
    script = Path(__file__).with_name("tables.py")
    done = subprocess.run([sys.executable, script, *["warm"] * warm], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
