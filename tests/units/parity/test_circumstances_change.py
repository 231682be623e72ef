"""A circumstance changes something, names what it changes, and is not itself the answer to where two sides part."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity.pairs import draw

from ampcheck import UsageError, assert_parity
from ampcheck.parity import (
    Batch,
    BatchOrder,
    Chunks,
    Declared,
    Microbatches,
    Padding,
    Permutation,
    Scale,
    Shift,
)

X = draw(4, 8, dtype=torch.float32)
NOTHING = [
    (Padding(dim=5), X),
    (BatchOrder(dim=3), X),
    (BatchOrder(), X[:1]),
    (Scale(), torch.arange(4)),
    (Shift(), torch.arange(4)),
    (Shift(0.0), X),
    (Scale(1.0, 1.0), X),
    (Scale(), torch.zeros(4)),
    (Declared("nothing", lambda x: ((x,), {})), X),
]


@pytest.mark.parametrize(("circumstance", "x"), NOTHING, ids=lambda value: getattr(value, "name", ""))
def test_an_invariance_that_changes_no_argument_is_refused(circumstance: Any, x: torch.Tensor) -> None:
    with pytest.raises(UsageError, match=r"must change an argument, and changes none"):
        assert_parity(lambda x: x.float() + x.float().mean() + torch.arange(x.shape[0]).sum(), circumstance, (x,))


HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x.sum(1),
    "elements and sum": lambda x: (x * 2, x.sum(1)),
    "first": lambda x: x[:, 0] * 2,
}


@pytest.mark.parametrize("name", HOLDS)
def test_padding_narrows_what_is_as_long_as_the_padded_inputs(name: str) -> None:
    assert_parity(HOLDS[name], Padding(dim=1, count=2), (draw(3, 5, 8),))
    assert_parity(HOLDS[name], Padding(dim=1, count=2, inputs=(0,)), (draw(3, 5, 8),))
    assert_parity(HOLDS[name], Padding(dim=1, count=3), (draw(3, 5, 8),))  # as many as there are features


def test_a_mean_over_padding_is_another_function_by_its_values() -> None:
    with pytest.raises(AssertionError, match="exact values differ by"):
        assert_parity(lambda x: x.mean(1), Padding(dim=1, count=2), (draw(3, 5, 8),))


def test_an_output_without_the_batch_is_not_reversed() -> None:
    assert_parity(lambda x: (x * 2, x.mean(0)), BatchOrder(), (draw(3, 8),))


@pytest.mark.parametrize(
    "circumstance", [Padding(dim=1, value=3.0), Scale(3.0), Shift(1.0), Permutation(-1)], ids=lambda c: c.name
)
@pytest.mark.parametrize("relation", ["rounding", "bitwise"])
def test_where_two_sides_part_is_an_op_of_the_function(circumstance: Any, relation: str) -> None:
    def function(x: torch.Tensor) -> Any:
        return x.sigmoid().softmax(-1).cumsum(-1)

    with pytest.raises(AssertionError, match=r"forward, aten::\w+.* forward, aten::\w+") as raised:
        assert_parity(function, circumstance, (X,), relation=relation, backward=False)
    ops = {op for op in re.split(r"[ ,]+", str(raised.value)) if op.startswith("aten::")}
    assert ops <= {"aten::sigmoid", "aten::_softmax", "aten::cumsum"}


def test_a_gradient_parts_at_an_op_of_the_function() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x - x.mean()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * x.tanh()

    with pytest.raises(AssertionError, match=r"gradient argument 0\.0: .*b runs backward, aten::tanh"):
        assert_parity(Doubled.apply, Shift(1.0), (X,))


@pytest.mark.parametrize("kind", [Batch, Microbatches])
@pytest.mark.parametrize("inputs", [0, "xxinputxx", (), (True,)], ids=repr)
def test_inputs_of_a_circumstance_are_positions_and_keywords(kind: Any, inputs: Any) -> None:
    with pytest.raises(UsageError, match=rf"inputs of {kind.__name__} must be positions or keywords"):
        kind(inputs=inputs)


@pytest.mark.parametrize("circumstance", [Batch(inputs=("mask",)), Microbatches(inputs=("mask",)), Shift(inputs=[3])])
def test_inputs_that_are_no_arguments_are_refused_with_those_that_are(circumstance: Any) -> None:
    with pytest.raises(UsageError, match=r"must be arguments, here 0, 'weight'; found"):
        assert_parity(lambda x, weight: (x @ weight).mean(), circumstance, (X,), {"weight": X.T})


def test_microbatches_split_the_inputs_that_they_name() -> None:
    assert_parity(lambda w, x: (x @ w).square().mean(), Microbatches(2, inputs=(1,)), (draw(8, 3), draw(4, 8)))


def test_values_that_both_have_are_made_somewhere() -> None:
    with pytest.raises(AssertionError, match="exact values differ") as raised:
        assert_parity(lambda x: x[x.sum(1).argmax()].expand_as(x), Batch(), (X,))
    assert "by None" not in str(raised.value)


def test_a_step_that_returns_a_tensor_alone_is_refused() -> None:
    with pytest.raises(UsageError, match=r"step of Chunks must return \(output, state\).* shape \[2, 6, 8\]"):
        assert_parity(torch.tanh, Chunks(2, step=lambda f, x, _: f(x)), (draw(2, 6, 8),))


def test_a_class_in_place_of_a_circumstance_is_refused() -> None:
    for sides in ((torch.tanh, Batch), (Batch, torch.tanh)):
        with pytest.raises(UsageError, match=r"give Batch\(\)"):
            assert_parity(*sides, (X,))
