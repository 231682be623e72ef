"""A failure names the op at which it happens, with its line, and what mends an op of that family."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from textbook import TEXTBOOK
from torch import Tensor

from ampcheck import assert_property
from ampcheck.core.run import Finding, Verdict, collect
from ampcheck.core.subject import Subject
from ampcheck.search import SearchOptions
from ampcheck.search.arms import Arms, Example
from ampcheck.search.blame import _pairs, locate
from ampcheck.search.evaluate import Evaluator
from ampcheck.search.remedies import remedy
from ampcheck.search.stats import ACCURACY, INVARIANCE, NONFINITE, Problem
from ampcheck.strategies import tensors


def op_of(function: Callable[..., Any], *args: Tensor, dtype: torch.dtype | None = None) -> str:
    """The op that is blamed for the first problem of one example."""
    arms = Arms(Subject((function, args)), dtype or args[0].dtype, native=dtype is None)
    problem = Evaluator(arms).look(Example(args)).problems[0]
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


@pytest.mark.parametrize(
    ("function", "numbers", "op"),
    [
        (lambda x: (x * 1e5).clamp(-1, 1) + ((x + 1000) - 1000), (3.3,), "sub"),  # infinite, and clamped to 1
        (lambda x: x.mul(1).mul_(1e5).clamp_(-1, 1) + ((x + 1000) - 1000), (3.3,), "sub"),  # in the same memory
        (lambda x: (x - x.max()).exp() + ((x + 1000) - 1000), (0.3, -30.0), "sub"),  # zero in another element
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


@dataclass(frozen=True)
class Moved(Problem):
    """A problem with the example at which an invariance broke."""

    at: Any = None


@pytest.mark.parametrize(
    ("function", "at", "kind", "op"),
    [
        (TEXTBOOK["softmax"].naive, half(12.0), NONFINITE, "exp"),
        (lambda x: (x * 1e5).clamp(-1, 1) + ((x + 1000) - 1000), half(3.3), ACCURACY, "sub"),
    ],
)
def test_an_invariance_is_told_at_the_example_where_it_broke(
    function: Callable[..., Any], at: Tensor, kind: str, op: str
) -> None:
    arms = Arms(Subject((function, (at,))), torch.float16, native=True)
    found = Evaluator(arms).look(Example((at,))).problems[0]
    assert found.kind == kind
    whole = half(0.0)  # nothing is wrong there
    values = found.index, found.low, found.wide, found.observed, found.allowed, found.roundings
    for detail, moved, expected in (
        (f"mine: and yours: {kind}", Example((at,)), op),
        (f"mine: {kind}", None, ""),
        ("mine does not hold in float64 either", Example((at,)), ""),
    ):
        problem = Moved(INVARIANCE, found.output, *values, detail, moved)
        where = locate(arms, Example((whole,)), problem)
        assert where.op.removeprefix("aten::").partition(".")[0] == expected
        assert where.phase == "forward"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["mm"] * 8000, ["mm"] * 8000),
        (["mm"] * 8000 + ["add"], ["mm"] * 8001),
        (list("abcd") * 300, list("abcxd") * 300),
        (list("abcd") * 60, list("abxcd") * 54),
    ],
)
def test_thousands_of_ops_are_matched_in_no_time(one: list[str], other: list[str]) -> None:
    start = time.process_time()
    pairs = list(_pairs(one, other))
    assert time.process_time() - start < 1
    assert all(one[a] == other[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))


def test_ops_are_matched_around_those_of_one_run_alone_unless_they_are_too_many() -> None:
    steps = 40
    assert len(list(_pairs(list("abcd") * steps, list("abxcd") * steps))) >= 3 * steps  # of four in each
    assert list(_pairs(list("abcd"), list("abxyd"))) == [(0, 0), (1, 1), (3, 4)]
    assert list(_pairs(list("abcd") * 300, list("abxcd") * 300)) == [(0, 0), (1, 1)]


def test_under_autocast_the_ops_are_matched_beside_its_casts() -> None:
    weight, x = torch.tensor([[1.0, -1.0]]), torch.tensor([[20.0, 1.0]])

    def lost(x: Tensor) -> Tensor:
        return (1 - torch.nn.functional.linear(x, weight).sigmoid()).log()

    assert op_of(lost, x, dtype=torch.float16) == "log"


def broken(function: Callable[..., Any], inputs: Any) -> Finding:
    with collect() as runs, pytest.raises(AssertionError):
        assert_property(function, inputs=inputs, compile=False, options=SearchOptions(examples=40))
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
    for op in ("sum", "add", "mean", "sub_"):
        assert remedy("nonfinite", f"aten::{op}.Tensor").startswith("divide before summing")
    assert remedy("nonfinite", "aten::mm").startswith("scale an operand")
    assert remedy("nonfinite", "mine::op") == remedy("nonfinite", "")
    assert remedy("accuracy", "aten::exp") == remedy("accuracy", "")
    assert remedy("shape", "") == ""
