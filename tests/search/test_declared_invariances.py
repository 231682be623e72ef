"""Declared invariances: float64 is allowed its own rounding, and what cannot be declared is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ampcheck.errors import UsageError
from ampcheck.search import Declared, Padding, Scale, Shift
from ampcheck.search.arms import Arms, Example
from ampcheck.search.look import Look, Looker
from ampcheck.subject import Subject


def look(function: Callable[..., Any], x: torch.Tensor, invariance: Any) -> Look:
    return Looker(Arms(Subject((function, (x,))), x.dtype, native=True), (invariance,)).look(Example((x,)))


def test_a_shift_that_swallows_the_data_is_no_fault_of_the_function() -> None:
    x = torch.tensor([1e-38, 2e-38], dtype=torch.bfloat16)
    assert look(torch.mean, x, Shift(1.0, 1.0)).problems == []


def test_a_shift_that_does_not_hold_is_still_told() -> None:
    x = torch.tensor([0.5, 2.0], dtype=torch.bfloat16)
    assert [one.kind for one in look(torch.tanh, x, Shift(1.0)).problems] == ["invariance"]


@pytest.mark.parametrize(
    "wrong",
    [lambda: Padding(count=-1), lambda: Scale(math.nan), lambda: Scale(0.0), lambda: Shift(math.inf)],
)
def test_what_is_no_invariance_is_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        wrong()


def test_a_change_that_returns_no_arguments_is_told() -> None:
    with pytest.raises(UsageError, match=r"\(args, kwargs\)"):
        look(torch.tanh, torch.ones(2, dtype=torch.float16), Declared("odd", lambda x: -x))
