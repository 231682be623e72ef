"""A failure names the op at which it happens, with its line, and what mends an op of that family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from textbook import TEXTBOOK
from torch import Tensor

from ampcheck import assert_amp_property
from ampcheck.record import Finding, Verdict, collect
from ampcheck.search.arms import Arms, Example
from ampcheck.search.blame import locate
from ampcheck.search.look import Looker
from ampcheck.search.remedies import remedy
from ampcheck.strategies import tensors
from ampcheck.subject import Subject


def op_of(function: Callable[..., Any], *args: Tensor, dtype: torch.dtype | None = None) -> str:
    """The op that is blamed for the first problem of one example."""
    arms = Arms(Subject((function, args)), dtype or args[0].dtype, native=dtype is None)
    problem = Looker(arms).look(Example(args)).problems[0]
    return locate(arms, Example(args), problem).op.removeprefix("aten::").partition(".")[0]


def half(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


@pytest.mark.parametrize(
    ("name", "args", "op"),
    [
        ("softmax", (half(12.0),), "exp"),
        ("variance", (half(1.0, 1.001),), "sub"),
        ("rms_norm", (half(300.0),), "pow"),
        ("focal_loss", (half(-20.0),), "log"),  # of a sigmoid that became zero
        ("log1p_exp", (half(20.0),), "exp"),
        ("mean", (half(60000.0, 60000.0),), "sum"),
    ],
)
def test_the_op_is_the_one_that_breaks(name: str, args: tuple[Tensor, ...], op: str) -> None:
    assert op_of(TEXTBOOK[name].naive, *args) == op


def test_digits_that_cancel_are_told_at_the_difference_and_not_where_they_were_rounded() -> None:
    assert op_of(lambda x: ((x + 1).square() - x.square() - 2 * x) * 3 + 2, half(100.0)) == "sub"


def test_under_autocast_the_ops_are_matched_beside_its_casts() -> None:
    weight, x = torch.tensor([[1.0, -1.0]]), torch.tensor([[20.0, 1.0]])

    def lost(x: Tensor) -> Tensor:
        return (1 - torch.nn.functional.linear(x, weight).sigmoid()).log()

    assert op_of(lost, x, dtype=torch.float16) == "log"


def broken(function: Callable[..., Any], inputs: Any) -> Finding:
    with collect() as runs, pytest.raises(AssertionError):
        assert_amp_property(function, inputs=inputs, examples=40)
    return runs[0].of(Verdict.FAIL)[0]


def logarithm(x: Tensor) -> Tensor:
    return torch.log(x.sigmoid())


def test_the_finding_has_the_line_and_the_remedy_of_that_op() -> None:
    found = broken(logarithm, tensors("float16", shape=1, min_value=-100, max_value=0))
    assert found.where.file.endswith("test_culprit.py")
    assert found.where.op == "aten::log"
    assert "away from zero by an eps" in found.hint


def test_a_remedy_is_of_the_ops_family_where_a_value_is_not_finite() -> None:
    assert remedy("nonfinite", "aten::exp").startswith("subtract the largest")
    assert remedy("nonfinite", "aten::mm").startswith("scale an operand")
    assert remedy("nonfinite", "mine::op") == remedy("nonfinite", "")
    assert remedy("accuracy", "aten::exp") == remedy("accuracy", "")
    assert remedy("shape", "") == ""
