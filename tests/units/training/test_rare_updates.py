"""Promise: updates that come every few steps, and sums that go on over many, are followed like any other."""

from __future__ import annotations

import copy

import pytest
import torch
from narrow_loops import B16, F32, data, net
from torch import nn

from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.judge import judge_training


def judged(shape, *checks: str, steps: int = 24) -> Run:
    return judge_training(Plan.of(Subject(shape, name="loop"), checks=checks, steps=steps))


def failures(run: Run) -> list[Finding]:
    return [finding for finding in run.findings if finding.verdict is Verdict.FAIL]


def every(count, rate, dtype=B16, parts=None):
    """An optimizer that steps in every so many steps of the loop."""
    model, (x, y) = net(dtype), data(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(i):
        loss = (model(x) - y).float().square().mean() / count
        loss.backward()
        if (i + 1) % count == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, **(parts or {})}


@pytest.mark.parametrize("count", [1, 8])
def test_weights_that_rare_steps_cannot_move_are_found(count):
    (found,) = failures(judged(every(count, 1e-6), "stagnation"))
    assert "parameters" in found.message
    assert not failures(judged(every(count, 0.5), "stagnation"))


def test_weights_that_no_observed_step_updates_are_incomplete():
    head = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    shape = every(100, 0.5)
    first, (x, y) = shape["step"], data(F32)

    def step(i):
        first(i)
        optimizer.zero_grad()
        loss = (head(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    run = judged({**shape, "head": head, "second": optimizer, "step": step}, "stagnation")
    (found,) = run.of(Verdict.INCOMPLETE)
    assert "have gradients and were not updated in 24 steps" in found.message


@pytest.mark.parametrize(("dtype", "fails"), [(B16, True), (F32, False)])
def test_an_average_that_is_updated_now_and_then_is_followed(dtype, fails):
    model, (x, y) = net(F32), data(F32)
    average = copy.deepcopy(model).to(dtype).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(i):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if i % 8 == 7:
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                    kept.mul_(0.9999).add_(new.to(dtype), alpha=1e-4)
        return loss.item()

    run = judged({"model": model, "optimizer": optimizer, "average": average, "step": step}, "stagnation")
    assert bool(failures(run)) is fails, str(run)


@pytest.mark.parametrize(("dtype", "fails"), [(B16, True), (F32, False)])
def test_gradients_that_accumulate_over_many_steps_are_followed(dtype, fails):
    torch.manual_seed(0)
    model = nn.Linear(16, 4).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(i):
        x = torch.rand(64, 16, generator=torch.Generator().manual_seed(i)).to(dtype) + 1
        loss = (model(x) - 3).float().square().mean() / 64
        loss.backward()
        if (i + 1) % 64 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    run = judged({"model": model, "optimizer": optimizer, "step": step}, "reduce-precision", steps=70)
    assert bool(failures(run)) is fails, str(run)


def test_weights_whose_gradients_do_not_depend_on_them_are_no_running_sum():
    """The critic's bias of a hinge loss is moved by the same amount in each step; that is for stagnation to judge."""
    torch.manual_seed(0)
    model, (x, _) = nn.Linear(16, 1).to(B16), data(B16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(i):
        optimizer.zero_grad()
        loss = model(x).float().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    run = judged({"model": model, "optimizer": optimizer, "step": step}, "reduce-precision")
    assert not [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN) and f.check != "coverage"]


@pytest.mark.parametrize("planned", [2000, 1])
def test_a_warm_up_whose_first_updates_are_lost_does_not_fail(planned):
    """The rate grows until the updates arrive; without the growth the same updates are lost for good."""
    model, (x, y) = net(B16), data(B16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 if planned > 1 else 5e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / planned))

    def step(i):
        optimizer.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    shape = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step}
    assert bool(failures(judged(shape, "stagnation"))) is (planned == 1)
