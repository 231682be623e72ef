"""Promise: sums and averages that begin at zero, or stay there in part, are judged by the spacing at zero."""

from __future__ import annotations

import pytest
import torch
from measured_sums import measure_reductions
from narrow_loops import B16, F16, F32, data, failures, net
from torch import nn

from ampcheck.checks.training.reduce_precision import check as check_reductions
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict


def own_adam(first, second, rate=1e-5):
    """Adam by hand whose moments begin at zero; the squares of its gradients are below the smallest of float16."""
    model, (x, y) = net(F32), data(F32)
    means = {name: torch.zeros_like(p, dtype=first) for name, p in model.named_parameters()}
    squares = {name: torch.zeros_like(p, dtype=second) for name, p in model.named_parameters()}

    def step(i):
        model.zero_grad()
        loss = (model(x) - y).square().mean() * 1e-3
        loss.backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                mean, square = means[name], squares[name]
                mean.mul_(0.9).add_(p.grad.to(first), alpha=0.1)
                square.mul_(0.999).add_((p.grad.double() ** 2).to(second), alpha=0.001)
                p.sub_(rate * mean.float() / (square.float().sqrt() + 1e-3))
        return loss.item()

    return {"model": model, "step": step, "means": means, "squares": squares}


@pytest.mark.parametrize("first", [F16, F32])
def test_a_second_moment_that_never_leaves_zero_is_found_beside_any_first(first):
    (found,) = failures(own_adam(first, F16))
    assert "squares" in found.message
    assert not failures(own_adam(first, F32))


def test_state_of_an_optimizer_that_stays_at_zero_is_found_beside_state_that_moves():
    model, (x, y) = net(F16), data(F16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)

    def step(i):
        optimizer.zero_grad()
        loss = (model(x) - y).float().square().mean() * 1e-2
        loss.backward()
        optimizer.step()
        return loss.item()

    found = failures({"model": model, "optimizer": optimizer, "step": step})
    assert any("exp_avg_sq" in finding.message for finding in found)


def test_features_that_never_occur_do_not_hide_what_a_gradient_loses():
    """A zero gradient of a dead feature is exact; its neighbours were added up in bfloat16."""

    class Padded(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.linear = nn.Linear(4000 + 4, 1, dtype=dtype)

        def forward(self, x):
            return self.linear(nn.functional.pad(x, (0, 4000)))

    def verdict(dtype):
        torch.manual_seed(0)
        model = Padded(dtype)

        def micro_batches():
            for _ in range(128):
                (model(torch.rand(4, 4, dtype=dtype) + 1).sum() / 128).backward()

        (finding,) = check_reductions(measure_reductions(micro_batches), Limits())
        return finding.verdict

    assert verdict(B16) is Verdict.FAIL
    assert verdict(F32) is Verdict.PASS
