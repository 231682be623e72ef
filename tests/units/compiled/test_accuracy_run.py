"""The shadowed eager run of a subject, and compiled runs at each stage of the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcheck.compiled.accuracy.judge import run_compiled, run_eager
from ampcheck.core.subject import Subject
from ampcheck.numerics.run import RunPlan, run_subject
from ampcheck.records.accuracy import AOT_EAGER
from ampcheck.torchtools.copying import prepare


def test_what_is_not_compiled_is_eager_mode_itself() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    eager = run_eager(Subject((model, (torch.randn(4, 8),))), RunPlan(autocast=torch.bfloat16), torch.bfloat16)
    run = run_compiled(eager, blocks=lambda prepared: prepared.blocks)
    assert run.graphs.count == 0
    assert {error.kind for error in run.errors} == {"output", "gradient"}
    assert all(error.apart == 0 and not error.at_fault for error in run.errors)


def test_a_stage_that_raises_says_so() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise ValueError("no such op")

    subject = Subject((lambda x: x.sin(), [(torch.randn(4),)]))
    eager = run_eager(subject, RunPlan(no_backward="not asked"), torch.float32, {"backend": backend})
    assert "no such op" in run_compiled(eager).raised
    assert run_compiled(eager, AOT_EAGER).raised == ""


def test_successive_calls_and_updates_go_on_from_the_state_of_the_last() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    subject = Subject((model, [(torch.tensor([[1.0, 0.0]]),), (torch.tensor([[0.0, 1.0]]),)]))
    outcome = run_subject(prepare(subject), RunPlan(steps=2, rate=0.25), keep=True)
    # Gradient descent on y**2 with this rate halves the weight that the call's input chooses, at each step.
    assert [float(outcome.values["output", "", step]) for step in range(4)] == [1.0, 1.0, 0.5, 0.5]
    assert outcome.values["update", "weight", 3].tolist() == [[-0.75, -0.75]]


def test_casts_alone_in_a_float32_model_are_meant_and_autocast_is_not() -> None:
    def cast(x: Tensor) -> Tensor:
        return (x * 3.3).half().float().tanh()

    def product(x: Tensor) -> Tensor:
        return (x.half() @ x.half().T).float()

    for function, meant in ((cast, True), (product, False), (torch.tanh, False)):
        eager = run_eager(Subject((function, [(torch.randn(4, 4),)])), RunPlan(no_backward="not asked"), torch.float32)
        assert eager.casts is meant


@pytest.mark.parametrize(("values", "ties"), [([1.0, 3.0, 2.0], 0), ([1.0, 3.0, 3.0], 1)])
def test_decisions_that_a_rounding_turns_are_counted(values: list[float], ties: int) -> None:
    subject = Subject((lambda x: (x * 1.1).argmax(-1), [(torch.tensor([values]),)]))
    eager = run_eager(subject, RunPlan(no_backward="not asked"), torch.float32)
    assert eager.outcome.freedom is not None
    assert eager.outcome.freedom.near_ties == ties


def test_the_longest_sum_is_known() -> None:
    subject = Subject((nn.Linear(300, 4), (torch.randn(2, 300),)))
    outcome = run_eager(subject, RunPlan(no_backward="not asked"), torch.float32).outcome
    assert outcome.results["output", "", 0].terms == 300


def test_updates_of_an_optimizer_follow_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).train()
    plan = RunPlan(steps=3, optimizer=torch.optim.AdamW)
    eager = run_eager(Subject((model, (torch.randn(12, 8),))), plan, torch.float32)
    run = run_compiled(eager, AOT_EAGER)
    assert not [str(error) for error in run.errors if error.at_fault]
    assert any(error.kind == "update" for error in run.errors)
