"""Code that asks for the emulated device by name gets it, however it was written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ampcheck import emulate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, which is used then")
HALF, FULL = torch.float16, torch.float32
X = torch.ones(2, 2)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="User provided device_type")  # PyTorch's, that there is no CUDA
        yield


def test_a_decorated_forward_that_is_made_inside_follows_the_device_and_outside_it_is_off_again() -> None:
    with emulate("cuda"):

        @torch.autocast("cuda", dtype=HALF)
        def forward(x: Tensor) -> Tensor:
            return x @ x

        assert forward(X).dtype is HALF
    assert forward(X).dtype is FULL


def test_a_region_that_was_switched_off_before_stays_off_inside_and_is_counted() -> None:
    @torch.autocast("cuda", enabled=False)
    def wide(x: Tensor) -> Tensor:
        return x @ x

    with emulate("cuda", HALF) as emulation:
        assert (X @ X).dtype is HALF
        assert wide(X).dtype is FULL
    assert emulation.made_before == 1
    assert not torch.is_autocast_enabled("cpu")


def test_custom_forward_and_backward_for_the_device_cast_and_restore() -> None:
    seen = []

    class Wide(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FULL)
        def forward(ctx: object, x: Tensor) -> Tensor:
            seen.append((x.dtype, (x @ x).dtype))
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: object, grad: Tensor) -> Tensor:
            seen.append((grad.dtype, (X @ X).dtype))
            return grad * 2

    class Follows(Wide):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx: object, x: Tensor) -> Tensor:
            seen.append((x.dtype, (x @ x).dtype))
            return x * 2

    x = torch.ones(2, 2, dtype=HALF, requires_grad=True)
    with emulate("cuda"):
        for function in (Wide, Follows):
            with torch.autocast("cuda", HALF):
                out = function.apply(x)
            out.float().sum().backward()
    (wide, off), follows = seen[:2], seen[2:]
    assert wide == (FULL, FULL)
    assert off[1] is FULL  # its forward ran with autocast off, and so does its backward
    assert [computed for _, computed in follows] == [HALF, HALF]


def test_a_region_to_float32_is_what_it_is_on_cuda() -> None:
    with emulate("cuda"), torch.autocast("cuda", FULL):
        assert torch.is_autocast_enabled("cuda")
        assert (X.half() @ X.half()).dtype is FULL


def test_emulate_decorates() -> None:
    @emulate("cuda", HALF)
    def product(x: Tensor, depth: int = 1) -> Tensor:
        return product(x, depth - 1) if depth else x @ x

    assert product(X).dtype is HALF
    assert (X @ X).dtype is FULL


def test_regions_of_nested_emulations_are_put_back() -> None:
    before = [getattr(torch.autocast, name) for name in ("__init__", "__enter__", "__exit__")]
    with emulate("xpu"), emulate("cuda"):
        region = torch.autocast("cuda", HALF)
        with region:
            assert torch.mv(X, X[0]).dtype is HALF
    assert [getattr(torch.autocast, name) for name in ("__init__", "__enter__", "__exit__")] == before
    with region:
        assert (X @ X).dtype is FULL


@pytest.mark.parametrize("dtype", [torch.float64, FULL])
def test_a_recurrent_layer_leaves_float64_and_lengths_alone(dtype: torch.dtype) -> None:
    layer, x = nn.LSTM(4, 4).to(dtype), torch.ones(3, 2, 4, dtype=dtype)
    packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2])
    with emulate("cuda", HALF, release="2.13"):
        out, _ = layer(x)
        lengths = layer(packed)[0].batch_sizes
    assert out.dtype is (HALF if dtype is FULL else dtype)
    assert lengths.dtype is torch.int64
