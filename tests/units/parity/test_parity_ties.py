"""What is promised of data exactly at a tie or a kink: another choice there is no difference, and hides none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity.pairs import draw
from torch.nn import functional as F

from ampcheck.parity.calls import Side
from ampcheck.parity.compare import compare
from ampcheck.records.parity import AGREE, ANOTHER

WHOLE = draw(16, 12, dtype=torch.float32).round()
IMAGE = draw(2, 3, 8, 8, dtype=torch.float32).round()
PADDED = draw(2, 9, 8).index_fill(1, torch.arange(6, 9), 0.0)
LAYER, GATE = draw(8, 8, seed=1), draw(8, 4, seed=2)


def pooled(x: Any) -> Any:
    return F.unfold(x, 2, stride=2).view(2, 3, 4, -1).amax(2).view(2, 3, 4, 4)


def last_of_the_largest(x: Any) -> Any:
    return x.shape[-1] - 1 - x.flip(-1).argmax(-1)


def last_two(weights: Any) -> Any:
    values, places = weights.flip(-1).topk(2)
    return values, weights.shape[-1] - 1 - places


def routed(x: Any, largest: Callable[..., Any]) -> Any:
    weights, chosen = largest((x @ GATE).float().softmax(-1))
    experts = torch.stack([x * (number + 1) for number in range(4)], -1)
    return _mixed(experts, weights, chosen)


def _mixed(experts: Any, weights: Any, chosen: Any) -> Any:
    picked = experts.gather(-1, chosen[..., None, :].expand(*experts.shape[:-1], chosen.shape[-1]))
    return (picked * weights[..., None, :]).sum(-1)


BINARY = (draw(16, 12, dtype=torch.float32) > 0).float()

HONEST: dict[str, tuple[Any, Any, torch.Tensor]] = {
    "relu and clamp": (F.relu, lambda x: x.clamp(min=0), WHOLE),
    "relu and clamp of zeros and ones": (F.relu, lambda x: x.clamp(min=0), BINARY),
    "relu and a product": (F.relu, lambda x: x * (x >= 0), WHOLE),
    "relu and where": (lambda x: F.relu(x @ LAYER), lambda x: torch.where((y := x @ LAYER) >= 0, y, 0), PADDED),
    "relu and half of both": (F.relu, lambda x: (x + x.abs()) / 2, WHOLE),
    "a loss by parts": (
        lambda x: F.binary_cross_entropy_with_logits(x, (WHOLE > 0).float()),
        lambda x: (x.clamp(min=0) - x * (WHOLE > 0) + (-x.abs()).exp().log1p()).mean(),
        WHOLE,
    ),
    "abs and where": (torch.abs, lambda x: torch.where(x >= 0, x, -x), WHOLE),
    "relu6 and the smaller": (F.relu6, lambda x: torch.minimum(F.relu(x), torch.tensor(6.0)), 3 * WHOLE),
    "hardtanh and clamp": (F.hardtanh, lambda x: x.clamp(-1, 1), WHOLE),
    "leaky relu and where": (lambda x: F.leaky_relu(x, 0.1), lambda x: torch.where(x >= 0, x, 0.1 * x), WHOLE),
    "a pool and the largest": (lambda x: F.max_pool2d(x, 2), pooled, IMAGE),
    "largest by place and by value": (lambda x: x.max(-1).values, lambda x: x.amax(-1), WHOLE),
    "sort and topk": (lambda x: x.sort(-1, descending=True).values[..., :3], lambda x: x.topk(3).values, WHOLE),
    "the larger of two": (lambda x: torch.maximum(x, x.roll(1, 0)), lambda x: _larger(x, x.roll(1, 0)), WHOLE),
    "first and last index": (lambda x: x.argmax(-1), last_of_the_largest, WHOLE),
    "experts of padding": (
        lambda x: routed(x, lambda w: w.topk(2)),
        lambda x: routed(x, last_two),
        PADDED,
    ),
}


def _larger(x: Any, y: Any) -> Any:
    return torch.where(x >= y, x, y)


def _backward_times(factor: Any) -> Callable[[Any], Any]:
    """A function that is the identity, and whose gradient is another."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * factor

    return Scaled.apply


@pytest.mark.parametrize("name", HONEST)
def test_another_choice_at_a_tie_is_no_difference(name: str) -> None:
    a, b, x = HONEST[name]
    found = compare(Side("a", a, (x,)), Side("b", b, (x,)))
    assert found.outcome == AGREE, found
    assert any("exactly at a tie or a kink" in note for note in found.notes), found


PLANTED: dict[str, tuple[Any, Any, torch.Tensor]] = {
    "one gradient": (F.relu, lambda x: _backward_times(1 + 0.001 * (x == x.amax()))(x).clamp(min=0), WHOLE),
    "all gradients": (F.relu, lambda x: _backward_times(1.001)(x.clamp(min=0)), WHOLE),
    "gradients of zeros": (lambda x: x * 3, lambda x: torch.where(x == 0, x.detach() * 3, x * 3), WHOLE),
    "a slope": (lambda x: F.leaky_relu(x, 0.1), lambda x: torch.where(x >= 0, x, 0.11 * x), WHOLE),
    "another window": (lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2, padding=1)[..., :4, :4], IMAGE),
    "an index": (lambda x: x.argmax(-1), lambda x: last_of_the_largest(x.roll(1, 0)), WHOLE),
    "an index of one row": (
        lambda x: x.argmax(-1),
        lambda x: last_of_the_largest(x) + (x[:, 0] == x[:, 0].amax()),
        WHOLE,
    ),
    "another axis": (lambda x: x[:12].argmax(-1), lambda x: x[:12].argmax(0), WHOLE),
    "not a number": (lambda x: x.norm(dim=-1), lambda x: x.square().sum(-1).sqrt(), PADDED.float()),
    "another expert": (
        lambda x: routed(x, lambda w: w.topk(2)),
        lambda x: routed(x, lambda w: [t[..., 1:3] for t in w.sort(-1, descending=True)]),
        PADDED,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_tie_hides_nothing_else(name: str) -> None:
    a, b, x = PLANTED[name]
    found = compare(Side("a", a, (x,)), Side("b", b, (x,)))
    assert found.outcome == ANOTHER, found


def test_at_a_kink_weights_of_two_formats_are_one_function() -> None:
    weight = draw(8, 8, seed=5, dtype=torch.float32)
    narrow = weight.bfloat16()

    def wide(x: Any, factor: float = 1.0) -> Any:
        return _backward_times(factor)((x.float() @ weight).clamp(min=0)).bfloat16()

    ours = Side("a", lambda x: F.relu(x @ narrow), (PADDED,))
    assert compare(ours, Side("b", wide, (PADDED,))).outcome == AGREE
    found = compare(ours, Side("b", lambda x: wide(x, 1.01), (PADDED,)))
    assert (found.outcome, found.key) == (ANOTHER, "gradient argument 0.0"), found


def test_beside_a_tie_the_op_of_a_wrong_gradient_is_named() -> None:
    def wrong(x: Any) -> Any:
        return _backward_times(1.01)((x @ LAYER).clamp(min=0)) @ LAYER

    found = compare(Side("a", lambda x: F.relu(x @ LAYER) @ LAYER, (PADDED,)), Side("b", wrong, (PADDED,)))
    assert "then b runs backward, aten::mul" in found.message, found


@settings(max_examples=12)
@given(numbers=st.lists(st.integers(-2, 2), min_size=6, max_size=24), wrong=st.integers(0, 23))
def test_of_whole_numbers_at_a_kink_one_wrong_gradient_is_found(numbers: list[int], wrong: int) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    factor = torch.ones(len(numbers))
    assert compare(Side("a", F.relu, (x,)), Side("b", lambda x: x.clamp(min=0), (x,))).outcome != ANOTHER
    place = wrong % len(numbers)
    factor[place] = 2.0
    found = compare(Side("a", F.relu, (x,)), Side("b", lambda x: _backward_times(factor)(x).clamp(min=0), (x,)))
    assert (found.outcome == ANOTHER) is (numbers[place] >= 0), found
