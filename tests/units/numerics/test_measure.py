"""One eager run under a shadow: what is recorded, and that nothing of the user's is changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ampcheck.compiled.accuracy.judge import measure_compiled_run
from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Subject
from ampcheck.numerics import measure_numerics
from ampcheck.records import faults


def test_the_exact_values_are_those_of_a_float64_copy() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(3, 8)
    measured = measure_numerics(Subject((model, x)), torch.bfloat16, compared=True)
    wide = copy.deepcopy(model).double()
    out = wide(x.double())
    out.square().mean().backward()
    results = measured.run.results
    exact = {key: result.reference.exact for key, result in results.items() if result.reference is not None}
    assert torch.allclose(exact["output", "", 0], out, rtol=1e-12)
    for name, parameter in wide.named_parameters():
        assert torch.allclose(exact["gradient", name, 0], parameter.grad, rtol=1e-12)  # type: ignore[arg-type]


def test_float32_tensors_of_the_models_own_may_meet_16_bits_ones() -> None:
    class OwnTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight) @ torch.arange(16, dtype=torch.float32).view(4, 4)

    assert not measure_numerics(Subject((OwnTable(), torch.randn(2, 4))), torch.bfloat16).stats.faults


def test_a_model_that_raises_in_float32_too_is_a_usage_error_in_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"raises in float32 too, in forward.* \(RuntimeError: .*\)") as caught:
        measure_numerics(Subject((nn.Linear(4, 4), torch.randn(2, 5)), name="broken"), torch.bfloat16)
    assert "\n" not in str(caught.value)


def test_the_users_model_and_the_random_streams_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(8, 4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure_numerics(Subject((model, x)), torch.float16)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())
    assert model[2].training


def test_a_fault_names_its_op_module_line_and_source() -> None:
    class Variance(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).mean(-1) - x.mean(-1) ** 2

    model = nn.Sequential(nn.Identity(), Variance())
    stats = measure_numerics(Subject((model, 100 + torch.rand(4, 64))), torch.bfloat16, native=False).stats
    assert not stats.faults  # autocast leaves these ops in float32
    half = (100 + torch.rand(4, 64)).bfloat16()
    stats = measure_numerics(Subject((model, half)), torch.bfloat16, native=True).stats
    (fault,) = [fault for fault in stats.faults if fault.where.phase == "forward"]
    assert fault.kind == faults.CANCELLATION
    assert (fault.where.module, fault.where.op) == ("1", "aten::sub.Tensor")
    assert stats.sources[fault.where.file, fault.where.line] == "return (x * x).mean(-1) - x.mean(-1) ** 2"
    assert "output" in " ".join(fault.reaches)


def test_the_loss_scale_backs_off_until_no_gradient_overflows() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 16

    torch.manual_seed(0)
    stats = measure_numerics(Subject((Scaled(8, 8), torch.randn(4, 8) * 4)), torch.float16).stats
    assert stats.scale < 65536
    assert not any(error.nonfinite for error in stats.errors)


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), nn.Identity()])
def test_compiled_code_draws_as_eager_mode_does_and_is_compared(drop: nn.Module) -> None:
    torch.manual_seed(0)
    subject = Subject((nn.Sequential(nn.Linear(16, 16), drop, nn.Linear(16, 4)).train(), torch.randn(8, 16)))
    eager = measure_numerics(subject, torch.bfloat16, compared=True)
    compiled = measure_compiled_run(subject, eager, torch.bfloat16)
    assert compiled.graphs
    assert [(e.kind, e.name) for e in compiled.errors] == [(e.kind, e.name) for e in eager.stats.errors]
    assert not any(error.beyond(2.0) or error.at_fault for error in compiled.errors)
