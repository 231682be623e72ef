"""The bound: honest rounding never exceeds it, and what it does not explain is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import evaluator, kinds, look

from ampcheck.core.formats import format_of
from ampcheck.parity.example import as_example
from ampcheck.strategies import shapes, tensors

FORMATS = ("float16", "bfloat16")
Function = Callable[..., Any]


def rounded_once(function: Function) -> Function:
    """The same computed in float64 and rounded once: nobody can do better."""

    def best(x: torch.Tensor) -> Any:
        return function(x.double()).to(x.dtype)

    return best


@torch.library.custom_op("ampcheck_tests::wrong", mutates_args=())
def wrong(x: torch.Tensor) -> torch.Tensor:
    """A copy that is off by 128 roundings in 16 bits."""
    off = 128 * format_of(x.dtype).unit_roundoff if x.dtype.itemsize == 2 else 0.0
    return (x.double() * (1 + off)).to(x.dtype)


COMPOSED: dict[str, Function] = {
    "softplus": lambda x: torch.log1p(x.exp()),
    "variance": lambda x: x.var(correction=0),
    "sine of a square": lambda x: (x * x).sin(),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "difference of squares": lambda x: x.square().sum() - x.sum().square(),
    "steps": lambda x: x.floor() + (x > 1).to(x.dtype),
    "sorted": lambda x: x.sort().values.diff(),
    "inverse": lambda x: 1 / x,
}


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_result_that_is_rounded_once_is_always_honest(name: str, fmt: str, data: st.DataObject) -> None:
    x = data.draw(tensors(fmt, shape=shapes(max_dims=1), min_value=-50, max_value=50))
    found = [k for k in kinds(rounded_once(COMPOSED[name]), x) if k != "range"]  # 1 / x may leave float16
    assert found == []


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_result_that_is_off_by_more_than_its_roundings_is_seen(fmt: str, data: st.DataObject) -> None:
    """The kernel is wrong in the format alone."""
    x = data.draw(tensors(fmt, shape=4, min_value=0.5, max_value=4))
    assert kinds(lambda x: wrong(x), x) == ["accuracy"]


@pytest.mark.parametrize(
    ("function", "values", "dtype", "kind"),
    [
        (lambda x: x.exp() / x.exp().sum(), [12.0, 0.0], torch.float16, "nonfinite"),
        (lambda x: x.exp() / x.exp().sum(), [89.0, 0.0], torch.bfloat16, "nonfinite"),
        (lambda x: x.exp(), [12.0], torch.float16, "range"),
        (lambda x: torch.log(1 + x.exp()), [-8.0], torch.float16, "accuracy"),
        (lambda x: (x + 1000) - 1000, [0.3], torch.float16, "accuracy"),
        (lambda x: x * torch.rsqrt(x.square().mean()), [300.0], torch.float16, "accuracy"),
        (lambda x: x * torch.rsqrt(x.square().mean()), [1e20], torch.bfloat16, "accuracy"),
        (lambda x: (x * 1e-6) * 1e6, [0.01], torch.float16, "accuracy"),
        (lambda x: ((x + 2048) - 2048).argmax(), [0.25, 1.0], torch.float16, "decision"),
    ],
    ids="softmax16 softmaxb exp softplus offset rms16 rmsb flush argmax".split(),
)
def test_a_loss_is_told_by_its_kind(function: Function, values: list[float], dtype: torch.dtype, kind: str) -> None:
    assert kinds(function, torch.tensor(values, dtype=dtype)) == [kind]


@pytest.mark.parametrize(
    ("function", "values", "dtype"),
    [
        (torch.nn.functional.gelu, [-6.0], torch.bfloat16),  # float32 gives zero there as well
        (lambda x: x.log_softmax(-1), [0.0, 17.0], torch.bfloat16),
        (lambda x: x - x.logsumexp(-1), [0.0, 10.0], torch.float16),
        (lambda x: x.log_softmax(-1), [1.0, -1.0], torch.float16),  # a common shift changes nothing
        (lambda x: x.var(correction=0), [100.0, 100.0625], torch.float16),
        (lambda x: torch.nn.functional.layer_norm(x, x.shape), [3.25], torch.float16),
        (lambda x: 30 * torch.tanh(x / 30), [3e-7], torch.float16),
        (lambda x: 30 * torch.tanh(x / 30), [6.67e-5], torch.float16),  # x / 30 is subnormal
        (lambda x: x.logsumexp(-1), [-0.0118, -0.00397, -0.00201], torch.bfloat16),  # made of ops that round
        (lambda x: x.round(), [2.4999], torch.float32),
        (lambda x: x.argmax(), [3.0, 3.0001], torch.float32),
        (lambda x: 1 / x, [0.0], torch.float16),  # infinite in float64 too
        (lambda x: x.log(), [-1.0], torch.float16),
        (lambda x: x.masked_fill(x > 0, -torch.inf), [1.0, 0.0], torch.float16),
    ],
    ids="gelu log_softmax lse shift variance norm softcap underflow logsumexp round argmax pole log mask".split(),
)
def test_what_rounding_or_float32_explains_is_honest(
    function: Function, values: list[float], dtype: torch.dtype
) -> None:
    low = torch.float16 if dtype is torch.float32 else None
    seen = look(function, torch.tensor(values, dtype=dtype), dtype=low)
    assert seen.problems == []
    assert seen.outside == ""


def test_an_example_that_float32_refuses_is_outside_the_domain() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.numel() < 3:
            raise ValueError("at least three")
        return x

    judge = evaluator(picky, torch.zeros(1), dtype=torch.float16)
    assert "at least three" in judge.look(as_example(torch.zeros(1))).outside
    assert judge.look(as_example(torch.zeros(3))).outside == ""


def test_a_model_that_raises_in_low_precision_alone_fails() -> None:
    def adds(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float16:
            raise RuntimeError("no kernel")
        return x

    assert kinds(adds, torch.zeros(2, dtype=torch.float16)) == ["raises"]


def test_looking_leaves_example_weights_buffers_and_random_numbers_as_they_were() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(3, 4)
    kept, stream = x.clone(), torch.random.get_rng_state()

    def writes(x: torch.Tensor) -> torch.Tensor:
        return model(x.mul_(2))

    seen = [look(writes, x, dtype=torch.bfloat16) for _ in range(2)]
    assert seen[0].problems == []
    assert torch.equal(x, kept)
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert seen[0].ratio == seen[1].ratio
