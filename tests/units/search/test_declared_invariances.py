"""Declared invariances: float64 is allowed its own rounding, and what cannot be declared is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from searches import evaluator, kinds, look

from ampcheck import assert_property
from ampcheck.core.errors import UsageError
from ampcheck.parity import Batch, Chunks, Permutation
from ampcheck.parity.example import Example
from ampcheck.search import BatchOrder, Declared, Padding, Scale, SearchOptions, Shift
from ampcheck.strategies import tensors


def test_a_shift_that_swallows_the_data_is_no_fault_of_the_function() -> None:
    x = torch.tensor([1e-38, 2e-38], dtype=torch.bfloat16)
    assert kinds(torch.mean, x, invariances=(Shift(1.0, 1.0),)) == []


def test_a_change_of_a_number_is_undone_too() -> None:
    x = torch.tensor([0.5, 2.0], dtype=torch.float16)
    assert kinds(lambda x: float(x.sum()), x, invariances=(Shift(1.0, 2.0),)) == []
    assert kinds(lambda x: (x * 2, float(x.sum())), x, invariances=(Shift(1.0, 2.0),)) == []


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


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0, keepdim=True)


def lossy_alone(x: torch.Tensor) -> torch.Tensor:
    return x if len(x) > 1 else (x + 2048) - 2048


@pytest.mark.parametrize("circumstance", [Batch(), Permutation(0), Chunks(1, 0, lambda f, x, _: (f(x), None))])
def test_a_search_takes_the_circumstances_of_parity(circumstance: Any) -> None:
    x = torch.tensor([[0.5, 2.0], [1.0, -3.0], [0.25, 4.0]], dtype=torch.float16)
    judge = evaluator(torch.tanh, x, invariances=(circumstance,))
    assert judge.look(Example((x,))).problems == []
    assert judge.counts == {circumstance.name: 1}


def test_a_circumstance_in_which_the_function_is_another_is_named() -> None:
    x = torch.tensor([[0.5, 2.0], [1.0, -3.0]], dtype=torch.float16)
    (problem,) = look(centred, x, invariances=(Batch(),)).problems
    assert problem.detail == "rows of a batch alone does not hold in float64 either"
    assert look(centred, x[:1], invariances=(Batch(),)).problems == []  # no smaller part to compare with
    with pytest.raises(UsageError, match="no dimension 0"):
        assert_property(torch.mean, tensors("float16", shape=(3,)), compile=False, invariances=(Batch(),))


def test_low_precision_is_judged_inside_a_circumstance() -> None:
    x = torch.tensor([[0.3, 2.0], [1.0, -3.0]], dtype=torch.float16)
    (problem,) = look(lossy_alone, x, invariances=(Batch(),)).problems
    assert (problem.detail, problem.where.op) == ("rows of a batch alone: accuracy", "aten::sub.Tensor")


def test_an_object_with_the_methods_of_an_invariance_is_one() -> None:
    class Odd:
        name = "odd"

        def changed(self, example: Example) -> Example:
            return example.mapped(torch.neg)

        def undone(self, output: torch.Tensor) -> torch.Tensor:
            return -output

    inputs = tensors("float16", shape=(3,), min_value=-4, max_value=4)
    options = SearchOptions(examples=5)
    run = assert_property(torch.tanh, inputs, compile=False, options=options, invariances=(Odd(),))  # type: ignore[arg-type]
    assert "odd held" in next(f.message for f in run.findings if f.check == "property-invariance")


def test_a_search_passes_over_examples_that_an_invariance_does_not_change() -> None:
    judge = evaluator(torch.tanh, torch.ones(1, 3, dtype=torch.float16), invariances=(BatchOrder(), Shift(0.0)))
    assert judge.look(Example((torch.ones(1, 3, dtype=torch.float16),))).problems == []
    assert not judge.counts
