"""Compiled code is held against float64 beside eager mode, compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InvalidCxxCompiler

from ampcheck import assert_property
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject
from ampcheck.parity.example import Example
from ampcheck.search import SearchOptions
from ampcheck.search.compiling import KINDS, Compiled
from ampcheck.search.evaluate import Evaluator
from ampcheck.search.runner import Runner
from ampcheck.strategies import tensors


def smooth(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * x


def evaluator(function: Any, replaced: Any) -> tuple[Evaluator, Compiled]:
    """An evaluator whose compiled code is `replaced`."""
    runner = Runner(Subject((function, (torch.zeros(2, dtype=torch.float16),))), torch.float16, native=True)
    compiled = Compiled(runner)
    compiled._function = replaced
    return Evaluator(runner, (), compiled), compiled


def test_compiled_code_that_is_right_passes_and_is_compiled_for_a_few_shapes() -> None:
    inputs = tensors("float16", shape=3, min_value=-4, max_value=4)
    run = assert_property(smooth, inputs=inputs, compile=True, options=SearchOptions(examples=10))
    (found,) = (f for f in run.findings if f.check == "property-compiled")
    if found.verdict is Verdict.SKIP:
        pytest.skip(found.message)
    assert found.verdict is Verdict.PASS


def test_compiled_code_that_is_worse_than_eager_mode_fails() -> None:
    judge, _ = evaluator(smooth, lambda x: smooth(x) * 1.1)
    (problem,) = judge.look(Example((torch.tensor([1.0, 2.0], dtype=torch.float16),))).problems
    assert (problem.kind, problem.detail) == ("compiled", "accuracy")


def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, (x * 2).argmax(-1)


def other_index(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores, index = best(x)
    return scores, (index + 1) % 2


def masked(x: torch.Tensor) -> torch.Tensor:
    return smooth(x) * (torch.tensor([1.0, 0.0]) > 0)


@pytest.mark.parametrize(
    ("function", "wrong", "text"),
    [
        (best, other_index, "it gives other integers than eager mode, 100% of output 1"),
        (smooth, lambda x: smooth(x).bfloat16(), "an output of torch.bfloat16"),
        (masked, lambda x: masked(x) * 1.4, "accuracy"),
    ],
)
def test_wrong_integers_another_dtype_and_what_a_mask_leaves_are_faults_of_compiled_code(
    function: Any, wrong: Any, text: str
) -> None:
    example = Example((torch.tensor([1.0, 2.0], dtype=torch.float16),))
    (problem,) = evaluator(function, wrong)[0].look(example).problems
    assert problem.kind == "compiled"
    assert text in problem.detail
    assert evaluator(function, function)[0].look(example).problems == []


def test_an_index_that_turns_at_a_near_tie_is_counted() -> None:
    judge, compiled = evaluator(lambda x: (x * 1.01).argmax(-1), lambda x: 1 - (x * 1.01).argmax(-1))
    assert judge.look(Example((torch.tensor([1.001, 1.0], dtype=torch.float16),))).problems == []
    assert compiled.ties == 1


def test_what_eager_mode_gets_wrong_too_is_no_finding_about_compiled_code() -> None:
    def offset(x: torch.Tensor) -> torch.Tensor:
        return (x + 2048) - 2048

    judge, _ = evaluator(offset, offset)
    (problem,) = judge.look(Example((torch.tensor([0.3, 0.2], dtype=torch.float16),))).problems
    assert problem.kind == "accuracy"


def test_an_exception_of_compiled_code_alone_fails() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("lowering failed")

    judge, _ = evaluator(smooth, broken)
    (problem,) = judge.look(Example((torch.ones(2, dtype=torch.float16),))).problems
    assert problem.kind == "compiled"
    assert "lowering failed" in problem.detail


def test_for_want_of_a_compiler_nothing_is_judged_and_the_reason_kept() -> None:
    def missing(x: torch.Tensor) -> torch.Tensor:
        frame = (None,) * (BackendCompilerFailed.__init__.__code__.co_argcount - 3)  # PyTorch 2.7 and later
        raise BackendCompilerFailed(torch.compile, InvalidCxxCompiler(), *frame)

    judge, compiled = evaluator(smooth, missing)
    assert judge.look(Example((torch.ones(2, dtype=torch.float16),))).problems == []
    assert "C++ compiler" in compiled.missing


def test_kinds_of_shapes_beyond_the_first_few_are_counted() -> None:
    judge, compiled = evaluator(smooth, smooth)
    for dims in range(KINDS + 2):
        judge.look(Example((torch.ones((2,) * dims, dtype=torch.float16),)))
    assert (compiled.examples, compiled.left_out) == (KINDS, 2)
