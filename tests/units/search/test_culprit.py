"""A failure names the op at which it happens, with its line, and what mends an op of that family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from searches import look
from textbook import TEXTBOOK
from torch import Tensor

from ampcheck import assert_property
from ampcheck.checks.property import remedy
from ampcheck.core.run import Finding, Verdict, collect
from ampcheck.search import SearchOptions, Shift
from ampcheck.strategies import tensors


def op_of(function: Callable[..., Any], *args: Tensor, dtype: torch.dtype | None = None) -> str:
    """The op that is blamed for the first problem of one example."""
    return look(function, *args, dtype=dtype).problems[0].where.op.removeprefix("aten::").partition(".")[0]


def half(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


@pytest.mark.parametrize(
    ("name", "args", "op"),
    [
        ("softmax", (half(12.0),), "exp"),
        ("variance", (half(100.0, 101.0),), "sub"),
        ("rms_norm", (half(300.0),), "pow"),
        ("focal_loss", (half(-20.0),), "sigmoid"),  # it became zero; its logarithm is infinite
        ("log1p_exp", (half(20.0),), "exp"),
        ("mean", (half(60000.0, 60000.0),), "sum"),
    ],
)
def test_the_op_is_the_one_that_breaks(name: str, args: tuple[Tensor, ...], op: str) -> None:
    assert op_of(TEXTBOOK[name].naive, *args) == op


def test_digits_that_cancel_are_told_at_the_difference_and_not_where_they_were_rounded() -> None:
    assert op_of(lambda x: ((x + 1).square() - x.square() - 2 * x) * 3 + 2, half(100.0)) == "sub"


@pytest.mark.parametrize(
    ("function", "numbers", "op"),
    [
        (lambda x: (x * 1e5).clamp(-1, 1) + ((x + 1000) - 1000), (3.3,), "sub"),  # infinite, and clamped to 1
        (lambda x: x.mul(1).mul_(1e5).clamp_(-1, 1) + ((x + 1000) - 1000), (3.3,), "sub"),  # in the same memory
        (lambda x: (x * x).sum() + ((x + 1000) - 1000), (0.3, 1e-4), "sub"),  # zero beside what is larger
        (lambda x: 100 * (1 / (x * 1e5 * 0.01)), (3.0,), "mul"),  # infinite, and zero in the end
        (lambda x: (x * 1e-5) * 1e5, (1e-3,), "mul"),  # zero all along
        (lambda x: ((x + 1000) - 1000) + -0.15, (0.3,), "sub"),  # most of the error; what follows makes it 57%
        (lambda x: torch.stack([((x + 1000) - 1000).half(), x]).flatten()[:1], (0.3,), "sub"),
    ],
)
def test_an_error_is_told_where_it_begins_on_its_way_to_the_output(
    function: Callable[[Tensor], Tensor], numbers: tuple[float, ...], op: str
) -> None:
    assert op_of(function, half(*numbers)) == op


def test_a_decision_upon_what_became_zero_is_told_at_the_op_that_flushed_it() -> None:
    assert op_of(lambda x: (x * 1e-6 * 1e6) > 5e-4, half(1e-3)) == "mul"


def test_what_is_written_into_a_part_of_a_tensor_is_followed() -> None:
    def parts(x: Tensor) -> Tensor:
        whole = torch.zeros(2, dtype=x.dtype)
        whole[0], whole[1] = ((x + 1000) - 1000)[0], x[0]
        whole[1].mul_(0.5)
        return whole * 3

    assert op_of(parts, half(0.3)) == "sub"


def test_of_several_outputs_the_one_that_broke_is_followed() -> None:
    assert op_of(lambda x: ((x + 1000) - 1000, (x * 1e-9) * 1e9), half(0.3)) == "sub"


def test_an_op_of_low_precision_alone_is_looked_through() -> None:
    def another_path(x: Tensor) -> Tensor:
        lossy = (x + 1000) - 1000
        return (lossy.neg().neg() if x.dtype is torch.float16 else lossy) * 3

    assert op_of(another_path, half(0.3)) == "sub"


def test_an_invariance_is_told_at_the_op_where_it_breaks() -> None:
    (problem,) = look(TEXTBOOK["softmax"].naive, half(0.0), invariances=(Shift(12.0),)).problems
    assert (problem.kind, problem.where.op) == ("invariance", "aten::exp")
    (problem,) = look(torch.tanh, half(0.5), invariances=(Shift(1.0),)).problems
    assert "does not hold in float64 either" in problem.detail
    assert not problem.where.op


def test_an_op_is_found_under_autocast() -> None:
    weight, x = torch.tensor([[1.0, -1.0]]), torch.tensor([[20.0, 1.0]])

    def lost(x: Tensor) -> Tensor:
        return (1 - torch.nn.functional.linear(x, weight).sigmoid()).log()

    assert op_of(lost, x, dtype=torch.float16) == "rsub"


def broken(function: Callable[..., Any], inputs: Any) -> Finding:
    with collect() as runs, pytest.raises(AssertionError):
        assert_property(function, inputs=inputs, compile=False, options=SearchOptions(examples=40))
    return runs[0].of(Verdict.FAIL)[0]


def logarithm(x: Tensor) -> Tensor:
    return torch.log(x.sigmoid())


def test_the_finding_has_the_line_and_the_remedy_of_that_op() -> None:
    found = broken(logarithm, tensors("float16", shape=1, min_value=-100, max_value=0))
    assert found.where.file.endswith("test_culprit.py")
    assert found.where.op == "aten::sigmoid"  # it becomes zero; its logarithm is infinite
    assert "logsigmoid" in found.hint


def unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


def test_an_eps_that_vanishes_is_to_be_larger() -> None:
    found = broken(unit, tensors("float16", shape=4, min_value=0, max_value=0))
    assert found.where.op == "aten::add.Tensor"
    assert found.hint.startswith("use a larger eps")
    assert found.hint.endswith("or compute this part in float32")


def test_a_remedy_is_of_the_ops_family_where_a_value_is_not_finite() -> None:
    assert remedy("nonfinite", "aten::exp").startswith("subtract the largest")
    for op in ("sum", "add", "mean", "sub_"):
        assert remedy("nonfinite", f"aten::{op}.Tensor").startswith("divide before summing")
    assert remedy("nonfinite", "aten::mm").startswith("scale an operand")
    assert remedy("nonfinite", "mine::op") == remedy("nonfinite", "")
    assert remedy("accuracy", "aten::exp") == remedy("accuracy", "")
    assert remedy("shape", "") == ""
