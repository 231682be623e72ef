"""A tensor of a falsifying example is printed as code that gives the same tensor."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampcheck.strategies import LAYOUTS, as_code, masks, shapes, tensors, token_batches

pytest_plugins = ["pytester"]
DTYPES = ["float16", "bfloat16", "float32", "float64", "int64", "uint8", "bool"]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit by bit, with the same dtype, shape, and the same strides where they decide what lies where."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    strides = [(a, b) for a, b, n in zip(one.stride(), other.stride(), one.shape, strict=True) if n > 1]
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits) and (not one.numel() or all(a == b for a, b in strides))


@given(st.data(), st.sampled_from(DTYPES))
def test_the_code_of_a_tensor_gives_the_same_tensor(data: st.DataObject, dtype: str) -> None:
    tensor = data.draw(tensors(dtype, shape=shapes(min_dims=0, max_dims=5, min_side=0, max_side=3), layout="any"))
    assert same(eval(as_code(tensor), {"torch": torch}), tensor)


@given(tensors("float16", elements=st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 0.0, 6e-8])))
def test_so_it_does_with_infinities_nan_and_negative_zero(tensor: torch.Tensor) -> None:
    again = eval(as_code(tensor), {"torch": torch})
    assert repr(again.tolist()) == repr(tensor.tolist())


@given(masks((2, 3), kind="additive"), token_batches(50))
def test_so_it_does_inside_tuples_and_mappings(mask: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    value = (batch, {"mask": mask, "scale": 0.5, "bias": None, "dtype": torch.float16}, [mask])
    again = eval(as_code(value), {"torch": torch})
    assert same(again[1]["mask"], mask)
    assert same(again[0][0], batch[0])
    assert again[1]["scale"] == 0.5
    assert again[1]["bias"] is None
    assert again[1]["dtype"] is torch.float16


@pytest.mark.parametrize(
    ("tensor", "code"),
    [
        (torch.tensor([65504.0], dtype=torch.float16), "torch.tensor([65504.0], dtype=torch.float16)"),
        (torch.tensor([0.1], dtype=torch.bfloat16), "torch.tensor([0.1], dtype=torch.bfloat16)"),
        (torch.zeros(3, 4), "torch.full((3, 4), 0.0, dtype=torch.float32)"),
        (torch.zeros(0, 4), "torch.empty((0, 4), dtype=torch.float32)"),
        (torch.tensor([[1, 2]]).t(), "torch.tensor([[1], [2]], dtype=torch.int64)"),
        (
            torch.arange(4.0).view(2, 2).t(),
            "torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float32).transpose(-1, -2)",
        ),
        (torch.ones(1).expand(2), "torch.tensor([1.0], dtype=torch.float32).as_strided((2,), (0,))"),
    ],
    ids=["number", "short", "full", "empty", "contiguous", "transposed", "expanded"],
)
def test_the_code_is_short(tensor: torch.Tensor, code: str) -> None:
    assert as_code(tensor) == code


def test_a_real_falsifying_example_can_be_pasted(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from hypothesis import given, settings
        from ampcheck.strategies import tensors

        @settings(database=None, derandomize=True)
        @given(x=tensors("float16", shape=(2, 2), layout="transposed"), y=tensors("bfloat16", shape=1, max_value=9))
        def test_exp(x, y):
            assert not ((x.exp() == float("inf")).any() and x.stride() == (1, 2))
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    text = "\n".join(line.removeprefix("E").strip() for line in result.outlines)
    printed = re.search(r"(?:Falsifying example|Failing test case): test_exp\((.*?)^\)", text, re.S | re.M)
    assert printed, text
    found: dict[str, Any] = eval(f"dict({printed[1]})", {"torch": torch})
    assert found["x"].stride() == (1, 2)
    assert found["x"].dtype is torch.float16
    assert bool(found["x"].exp().isinf().any())
    assert same(found["y"], torch.zeros(1, dtype=torch.bfloat16))


@settings(max_examples=5)
@given(tensors("float32", shape=(64, 64)))
def test_a_large_tensor_is_code_too_though_hypothesis_prints_its_shape_alone(tensor: torch.Tensor) -> None:
    assert same(eval(as_code(tensor), {"torch": torch}), tensor)


def test_every_layout_has_a_test() -> None:
    assert set(LAYOUTS) == {
        "contiguous",
        "transposed",
        "sliced",
        "offset",
        "expanded",
        "channels_last",
        "channels_last_3d",
    }


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_the_largest_value_everywhere_is_code_that_runs(name: str) -> None:
    dtype = getattr(torch, name)
    for largest in (torch.finfo(dtype).max, torch.finfo(dtype).min):
        tensor = torch.full((5,), largest, dtype=dtype)
        assert torch.equal(eval(as_code(tensor), {"torch": torch}), tensor)
