"""The same subject at each stage of the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcheck.compiled.accuracy.arms import Plan, nudged, run_plan
from ampcheck.compiled.accuracy.ladder import measure_bench, run_rung
from ampcheck.compiled.accuracy.stats import AOT_EAGER, EAGER, EMULATED, INDUCTOR, LADDER
from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Subject
from ampcheck.torchtools.copying import prepare
from ampcheck.torchtools.dynamo import configured, uncompiled


def truncated(x: Tensor) -> Tensor:
    return (x * 3.3).half().float().tanh()


def test_each_rung_tells_where_a_truncation_is_lost() -> None:
    bench = measure_bench(Subject((truncated, [(torch.randn(64),)])), Plan(backward=False), torch.float32)
    errors = {}
    for rung in LADDER:
        (output,) = run_rung(bench, rung).deviations
        errors[rung] = output.compiled[0]
    assert errors[EAGER] == errors[AOT_EAGER]
    assert errors[EMULATED] < 1e-6
    assert errors[INDUCTOR] > 1e-5


def test_the_eager_rung_is_eager_mode_itself() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    bench = measure_bench(Subject((model, (torch.randn(4, 8),))), Plan(autocast=torch.bfloat16), torch.bfloat16)
    climb = run_rung(bench, EAGER)
    assert climb.graphs == 0
    assert climb.deviations
    for deviation in climb.deviations:
        assert deviation.compiled[0] == deviation.eager[0]
        assert deviation.between == 0


def test_a_rung_that_raises_says_so() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise ValueError("no such op")

    options = {"backend": backend}
    bench = measure_bench(Subject((truncated, [(torch.randn(4),)])), Plan(backward=False), torch.float32, options)
    assert "no such op" in run_rung(bench).raised
    assert run_rung(bench, AOT_EAGER).raised == ""


def test_a_model_with_kernels_for_float32_alone_is_judged_all_the_same() -> None:
    class NoDouble(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise RuntimeError("expected a Float tensor and found Double")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    def model(x: Tensor) -> Tensor:
        return torch.overrides.handle_torch_function(model, (x,), x) if False else wrapped(x.sin())

    def wrapped(x: Tensor) -> Tensor:
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(wrapped, (x,), x)
        return NoDouble.apply(x)

    bench = measure_bench(Subject((model, [(torch.randn(4),)])), Plan(backward=False), torch.float32)
    assert bench.how == "float64, but for kernels that exist in float32 alone"
    assert bench.incomparable == ""


def test_nudged_data_are_other_data_a_rounding_away_and_the_users_stay() -> None:
    model, given = nn.Linear(8, 4), torch.randn(4, 8)
    whole = torch.arange(4.0)
    near = nudged(Subject((model, [(given,), (whole,)])), 2**-8, 1)
    moved = (near.model.weight - model.weight).abs() / model.weight.abs()
    assert torch.allclose(moved, torch.full_like(moved, 2**-8), rtol=1e-3)
    assert not torch.equal(near.calls[0].args[0], given)
    assert torch.equal(near.calls[1].args[0], whole), "whole numbers are masks, positions and counts"
    again = nudged(Subject((model, [(given,), (whole,)])), 2**-8, 1)
    assert torch.equal(again.model.weight, near.model.weight)


def test_successive_calls_and_updates_go_on_from_the_state_of_the_last() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    subject = Subject((model, [(torch.tensor([[1.0, 0.0]]),), (torch.tensor([[0.0, 1.0]]),)]))
    found = run_plan(Plan(steps=2, rate=0.25), prepare(subject))
    # Gradient descent on y**2 with this rate halves the weight that the call's input chooses, at each step.
    outputs = [float(found.values["output", "", step].detach()) for step in range(4)]
    assert outputs == [1.0, 1.0, 0.5, 0.5]
    assert found.values["update", "weight", 3].tolist() == [[-0.75, -0.75]]


def test_an_unknown_setting_of_the_compiler_is_told() -> None:
    with (
        pytest.raises(UsageError, match=r"has no torch\._inductor\.config\.no_such_setting"),
        configured({"torch._inductor.config.no_such_setting": True}),
    ):
        pass


def test_what_torch_compile_was_given_is_found_again() -> None:
    def plain(x: Tensor) -> Tensor:
        return x

    model = nn.Linear(2, 2)
    assert uncompiled(torch.compile(model)) is model
    assert uncompiled(torch.compile(plain)) is plain
    assert uncompiled(model) is model
