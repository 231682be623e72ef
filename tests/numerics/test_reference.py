"""The judge is float64; what rounding of the data explains is measured on the model itself."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Subject
from ampcheck.numerics import measure_reference
from ampcheck.numerics.decisions import Decisions
from ampcheck.torchtools.trace import Trace


class OwnTable(nn.Module):
    """Mixes a float32 tensor of its own into a matmul, as rotary and relative-position code does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) @ torch.arange(16, dtype=torch.float32).view(4, 4)


def test_a_model_runs_in_float64_where_it_can() -> None:
    reference = measure_reference(Subject((nn.Linear(4, 4), torch.randn(2, 4))))
    assert reference.how == "float64"
    assert reference.wide.outcome.outputs[""].dtype is torch.float64
    assert set(reference.wide.outcome.gradients) == {"weight", "bias"}


def test_float32_tensors_of_the_models_own_are_promoted() -> None:
    reference = measure_reference(Subject((OwnTable(), torch.randn(2, 4))))
    assert reference.how == "float64, mixed operands promoted"
    x, module = torch.randn(2, 4), OwnTable()
    wide = measure_reference(Subject((module, x))).wide.outcome.outputs[""]
    table = torch.arange(16, dtype=torch.float64).view(4, 4)
    assert torch.equal(wide, x.double() @ module.weight.detach().double() @ table)


def test_a_model_that_insists_on_float32_is_judged_by_float32() -> None:
    class Insists(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise TypeError("float64 is not supported")
            return x * 2

    assert measure_reference(Subject((Insists(), torch.randn(3)))).how == "float32"


def test_a_model_that_raises_in_float32_too_is_a_usage_error_in_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"raises in float32 too, in forward \(RuntimeError: .*\)") as caught:
        measure_reference(Subject((nn.Linear(4, 4), torch.randn(2, 5)), name="broken"))
    assert "\n" not in str(caught.value)


def test_the_sensitivity_is_how_far_the_model_moves_when_its_data_are_rounded() -> None:
    dtype, roundoff = torch.bfloat16, 2.0**-8
    linear = nn.Linear(256, 256, bias=False)
    reference = measure_reference(Subject((linear, torch.randn(8, 256))))
    moved = reference.moved(dtype, ())
    wide = reference.wide.outcome.outputs[""]
    for run in moved:
        assert float((run.outcome.outputs[""] - wide).norm() / wide.norm()) == pytest.approx(roundoff, rel=0.1)
    cancels = nn.Sequential(nn.Linear(256, 256), Minus50())
    nn.init.constant_(cancels[0].bias, 50.0)
    amplifying = measure_reference(Subject((cancels, torch.randn(8, 256))))
    wide = amplifying.wide.outcome.outputs[""]
    far = float((amplifying.moved(dtype, ())[0].outcome.outputs[""] - wide).norm() / wide.norm())
    assert far > 10 * roundoff


class Minus50(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - 50


def test_the_users_model_and_the_random_streams_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(8, 4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure_reference(Subject((model, x)))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())
    assert model[2].training


def test_random_models_are_told() -> None:
    assert measure_reference(Subject((nn.Dropout(0.5).train(), torch.ones(4)))).wide.draws
    assert not measure_reference(Subject((nn.Dropout(0.5).eval(), torch.ones(4)))).wide.draws


def test_random_numbers_of_numpy_are_told_as_well() -> None:
    noisy = measure_reference(Subject((lambda x: x * float(np.random.rand()), torch.ones(4))))
    assert noisy.wide.draws


def _decided(x: Tensor) -> Decisions:
    decisions = Decisions()
    with Trace(observers=(decisions,)):
        x.topk(1).indices.float() + F.relu(x).sum() + (x > 0).float().sum()
    return decisions


def test_a_decision_that_falls_otherwise_is_counted() -> None:
    first = _decided(torch.tensor([[1.0, 2.0], [3.0, -1.0]]))
    assert first.flips(_decided(torch.tensor([[1.0, 2.0], [3.0, -1.0]]))) == ()
    flips = first.flips(_decided(torch.tensor([[2.5, 2.0], [3.0, 1.0]])))
    assert [(flip.where.op, flip.changed, flip.numel) for flip in flips] == [
        ("aten::topk", 1, 2),
        ("aten::gt.Scalar", 1, 4),
    ]
