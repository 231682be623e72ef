"""One rule for a loss scale below 1, in an audit and in a watch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampcheck
from ampcheck.checks.training.loss_scale import check as check_loss_scale
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.scales import LossScaleStats, ScalerStep
from ampcheck.training.monitor.judge import loss_scale_stats


def trained(init: float, gradient: float, steps: int = 12) -> tuple[Verdict, Verdict]:
    """What a watch and an audit say of the scale of a loop whose gradients are float16 while they are scaled."""
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=init)
    path = []
    with ampcheck.watch(nn.Identity(), optimizer, scaler, exact=False, fail_on="never") as seen:
        for step in range(steps):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            assert weight.grad is not None
            weight.grad = (weight.grad * gradient).half().float()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < before
            path.append(ScalerStep(step, before, not skipped, skipped, scaler.get_scale()))
    stats = seen.stats.training
    (watched,) = (one.verdict for one in seen.run.findings if one.check == "loss-scale")
    counted = loss_scale_stats(stats, Limits())
    assert counted is not None
    assert [(s.scale, bool(s.skipped), s.new_scale) for s in counted.steps] == [
        (s.scale, s.skipped, s.new_scale) for s in path
    ]
    told = check_loss_scale(LossScaleStats(True, tuple(path), "s", "float16", counted.window), Limits())
    return watched, told[0].verdict


@pytest.mark.parametrize(
    ("init", "gradient", "verdict"),
    [
        (0.5, 1.0, Verdict.PASS),  # set low, and no step is skipped
        (2.0, 2.0**16, Verdict.WARN),  # falls to where gradients of such a size fit
        (4.0, float("nan"), Verdict.FAIL),  # falls without end
    ],
)
def test_a_watch_judges_a_scale_below_1_as_an_audit_does(init: float, gradient: float, verdict: Verdict) -> None:
    assert trained(init, gradient) == (verdict, verdict)
