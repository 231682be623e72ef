"""Losses and weights that do not stay finite while a loop runs as it is."""

from __future__ import annotations

import pytest
import torch
from training_loops import amp_loop, mlp

from ampcheck.core.plan import Plan
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.judge import judge_training

CHECKS = ("overflow", "nonfinite-gradient")


def verdicts(shape, steps=8):
    run = judge_training(Plan.of(Subject(shape, name="loop"), checks=CHECKS, steps=steps))
    return {finding.check: finding for finding in run.findings if finding.check in CHECKS}


def test_a_loop_that_stays_finite_passes():
    assert {check: f.verdict for check, f in verdicts(amp_loop()).items()} == dict.fromkeys(CHECKS, Verdict.PASS)


def test_a_pass_of_infinite_losses_that_a_scaler_leaves_out_is_no_failure():
    shape = amp_loop()
    step = shape["step"]
    found = verdicts({**shape, "step": lambda i: float("inf") if i < 3 else step(i)})
    assert found["overflow"].verdict is Verdict.PASS


def test_weights_that_become_nan_are_named_with_the_module():
    model = mlp().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16, dtype=torch.float16)).float().square().mean() * 1e-6
        loss.backward()
        optimizer.step()
        return loss.item()

    found = verdicts({"model": model, "optimizer": optimizer, "step": step})
    assert found["nonfinite-gradient"].verdict is Verdict.FAIL
    assert "they became so within 8 steps" in found["nonfinite-gradient"].message
    assert found["overflow"].verdict is Verdict.FAIL
    assert "from step 1 on" in found["overflow"].message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_at_the_start_are_told_so(value):
    shape = amp_loop(scaled=False)
    with torch.no_grad():
        shape["model"][0].weight[0, 0] = value
    found = verdicts(shape)["nonfinite-gradient"]
    assert found.verdict is Verdict.FAIL
    assert "before the first step" in found.message
