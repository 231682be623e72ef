"""Declared invariances: float64 is allowed its own rounding, and what cannot be declared is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from searches import kinds

from ampcheck.core.errors import UsageError
from ampcheck.search import BatchOrder, Declared, Padding, Scale, Shift
from ampcheck.search.example import Example


def test_a_shift_that_swallows_the_data_is_no_fault_of_the_function() -> None:
    x = torch.tensor([1e-38, 2e-38], dtype=torch.bfloat16)
    assert kinds(torch.mean, x, invariances=(Shift(1.0, 1.0),)) == []


def test_a_shift_that_does_not_hold_is_still_told() -> None:
    x = torch.tensor([0.5, 2.0], dtype=torch.bfloat16)
    assert kinds(torch.tanh, x, invariances=(Shift(1.0),)) == ["invariance"]


@pytest.mark.parametrize(
    "wrong",
    [lambda: Padding(count=-1), lambda: Scale(math.nan), lambda: Scale(0.0), lambda: Shift(math.inf)],
)
def test_what_is_no_invariance_is_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        wrong()


def test_a_change_that_returns_no_arguments_is_told() -> None:
    with pytest.raises(UsageError, match=r"\(args, kwargs\)"):
        kinds(torch.tanh, torch.ones(2, dtype=torch.float16), invariances=(Declared("odd", lambda x: -x),))


def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A mean over what the mask keeps: free of what is padded only if the mask says that it is."""
    return (x * mask).sum(-1) / mask.sum(-1).clamp_min(1)


def test_an_invariance_changes_the_inputs_that_it_names_alone() -> None:
    x, mask = torch.tensor([1.0, 3.0], dtype=torch.float16), torch.tensor([1.0, 0.0], dtype=torch.float16)

    def broken(*invariances: Any) -> list[str]:
        return kinds(attend, x, mask, invariances=invariances)

    assert broken(Shift(1.0, 1.0)) == ["invariance"]  # the mask moves as well
    assert broken(Shift(1.0, 1.0, inputs=(0,))) == []
    assert broken(Scale(2.0, 1.0, inputs=(0,)), BatchOrder(inputs=(0, 1)), Padding(value=0.0)) == []
    assert broken(Scale(2.0, 0.0, inputs=[1])) == []
    assert broken(BatchOrder(inputs=[0])) == ["invariance"]


def test_inputs_are_named_by_keyword_too() -> None:
    example = Example((torch.ones(2),), {"mask": torch.ones(2)})
    changed = Scale(3.0, inputs=("mask",)).changed(example)
    assert changed.args[0].tolist() == [1, 1]
    assert changed.kwargs["mask"].tolist() == [3, 3]


@pytest.mark.parametrize("inputs", [0, "mask", (), (True,), (1.5,)], ids=repr)
def test_what_names_no_inputs_is_refused(inputs: Any) -> None:
    with pytest.raises(UsageError, match=r"positions or keywords, such as \(0, 'mask'\)"):
        BatchOrder(inputs=inputs)


def test_inputs_that_are_not_there_are_told_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="here 0, 'mask'; found 'weights'"):
        Shift(inputs=("weights",)).changed(Example((torch.ones(1),), {"mask": torch.ones(1)}))
