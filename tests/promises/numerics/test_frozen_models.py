"""What is promised of models that run without gradients: one for inference is not asked for a backward pass."""

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck import Verdict


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize(("trained", "verdict"), [(True, Verdict.INCOMPLETE), (False, Verdict.SKIP)])
def test_a_backward_pass_is_missing_where_something_is_trained(trained: bool, verdict: Verdict) -> None:
    run = ampcheck.audit((Predictor().requires_grad_(trained), (torch.randn(4, 8),)), compile=False)
    assert {finding.verdict for finding in run.by("nonfinite-gradient")} == {verdict}


def test_a_frozen_model_is_judged_backward_as_a_loss_is() -> None:
    run = ampcheck.audit(
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False), (torch.randn(4, 8),)), compile=False
    )
    assert {finding.verdict for finding in run.by("nonfinite-gradient")} == {Verdict.PASS}
