"""Losses that the observed steps do not show yet, and those that never come."""

from __future__ import annotations

import pytest
import torch
from narrow_loops import B16, F16, F32, Counting, data, failures, judged, loop, measured, net, sgd
from stopping_loops import CASES, batch_norm, optimizer, pairs
from torch import nn

from ampcheck.audit import audit
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Verdict
from ampcheck.core.subject import Subject
from ampcheck.training.loop import TrainingLoop

QUICK = ("lerp_ by 0.001 from zero", "lerp_ by 0.01 from above", "a counter", "increments of 0.37")


def _near(case, steps):
    for name, (predicted, observed) in pairs(case, steps).items():
        assert predicted == pytest.approx(observed, rel=0.2), name


@pytest.mark.parametrize("case", [c for c in CASES if c.name in QUICK and c.dtype is B16], ids=str)
def test_a_tensor_stops_where_the_first_steps_say(case):
    _near(case, 400)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tensor_stops_in_a_long_run_where_the_first_steps_say(case):
    _near(case, 10_000)


def test_running_statistics_that_will_stop_are_found_while_every_update_still_arrives():
    parts = batch_norm(0.01, 256, fixed=True)(B16)
    stats = measured(parts)
    variance = next(tensor for tensor in stats.tensors if tensor.name == "running_var")
    assert variance.lost == 0
    (found,) = [finding for finding in failures(parts) if "running_var" in finding.message]
    assert "keep 0.99 of itself" in found.message
    assert 0.2 < found.observed < 0.4
    assert found.where.file.endswith("stopping_loops.py")
    assert "float32" in found.hint
    assert "stochastic rounding" in found.hint


@pytest.mark.parametrize("momentum", [0.1, 0.05])
def test_running_statistics_of_the_usual_momentum_pass(momentum):
    assert not judged_badly(batch_norm(momentum, 256, fixed=True)(B16))


def judged_badly(parts):
    return [finding for finding in judged(parts) if finding.verdict in (Verdict.FAIL, Verdict.WARN)]


@pytest.mark.parametrize("momentum", [0.01, 0.001])
def test_running_statistics_in_float32_pass(momentum):
    assert not judged_badly(batch_norm(momentum, 256, fixed=True)(F32))


@pytest.mark.parametrize("dtype", [B16, F16])
def test_moments_of_the_usual_betas_are_told_apart(dtype):
    adam = optimizer(torch.optim.Adam, lr=1e-2)
    names = " ".join(finding.message for finding in judged_badly(adam(dtype)) if finding.where.op.find("vanish"))
    assert "weight.exp_avg_sq keeps 0.999" in names
    assert "weight.exp_avg " not in names
    assert not failures(optimizer(torch.optim.Adam, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)(dtype))


def test_second_moments_that_are_zero_in_float16_are_found_with_any_beta():
    model = nn.Linear(8, 4).half()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).half() * 1e-2
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.9), eps=1e-3)

    def step(i):
        adam.zero_grad()
        (model(x) * 1e-2).float().sum().backward()
        adam.step()
        return 0.0

    assert any("0.9 of itself" in f.message for f in failures({"model": model, "optimizer": adam, "step": step}))


def following(change, dtype=B16, **more):
    """A float32 model and a tensor `mean` that follows its weight by `change(mean, weight, state)`."""
    model = net(F32)
    mean = model[0].weight.detach().clone().to(dtype)
    state: dict[str, torch.Tensor] = {"missing": torch.zeros_like(mean)}

    def after(i, loss):
        with torch.no_grad():
            change(mean, model[0].weight, state)

    return loop(model, sgd(model, 0.1), after, mean=mean, state=state, **more)


def kahan(mean, value, state):
    state["missing"].add_((value - mean.float()).to(mean.dtype), alpha=0.001)
    old = mean.clone()
    mean.add_(state["missing"])
    state["missing"].add_(old.sub_(mean))


def noisy(mean, value, state):
    spacing = 2.0 ** (torch.floor(torch.log2(mean.float().abs() + 1e-30)) - 7)
    mean.copy_(mean.float().lerp(value, 0.001) + (torch.rand(mean.shape) - 0.5) * spacing)


def master(mean, value, state):
    wide = state.setdefault("wide", mean.float())
    mean.copy_(wide.lerp_(value, 0.001))


@pytest.mark.parametrize("change", [kahan, noisy, master])
def test_an_average_that_another_tensor_carries_or_that_rounds_at_random_passes(change):
    assert not judged_badly(following(change))


@pytest.mark.parametrize(("weight", "fails"), [(0.1, False), (0.001, True)])
def test_an_average_fails_by_what_it_never_closes(weight, fails):
    found = failures(following(lambda mean, value, state: mean.lerp_(value.to(mean.dtype), weight)))
    assert bool(found) is fails
    assert len(found) <= 1


def test_a_tensor_that_is_scaled_and_then_overwritten_has_no_updates_to_replay():
    assert not failures(following(lambda mean, value, state: mean.mul_(0.999).copy_(value)))


def test_a_mean_of_values_that_hardly_differ_is_only_warned_of():
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=None, affine=False), nn.Linear(8, 4)).to(B16)
    found = judged(loop(model, sgd(model, 0.0)))
    assert all(finding.verdict is not Verdict.FAIL for finding in found)


def test_values_that_vary_by_more_than_the_spacing_carry_an_average_along():
    noise = torch.Generator().manual_seed(0)

    def change(mean, value, state):
        mean.lerp_(torch.randn(mean.shape, generator=noise).to(mean.dtype), 0.01)

    assert not judged_badly(following(change))


@pytest.mark.parametrize(("horizon", "fails"), [(100, False), (10_000, True)])
def test_a_sum_that_stops_beyond_the_planned_steps_passes(horizon, fails):
    model = Counting(F32).to(B16)
    parts = {**loop(model, sgd(model, 0.0)), "horizon": horizon}
    assert bool(failures(parts)) is fails


@pytest.mark.parametrize(
    ("directions", "fails"), [([1.0, 1.0], True), ([1.0, -1.0], True), ([-1.0] + [1.0] * 7, True), (None, False)]
)
def test_a_sum_whose_elements_grow_in_directions_of_their_own_stops_too(directions, fails):
    noise = torch.Generator().manual_seed(0)

    model = net(F32)
    total = torch.zeros(8 if directions is None else len(directions), dtype=B16)

    def after(i, loss):
        to_and_fro = torch.randn(8, generator=noise)
        total.add_((1e-3 * (to_and_fro if directions is None else torch.tensor(directions))).to(B16))

    assert bool(failures(loop(model, sgd(model, 0.1), after, total=total, horizon=5_000))) is fails


@pytest.mark.parametrize("horizon", [0, -1, "all", 2.5])
def test_a_horizon_that_is_no_number_of_steps_is_refused(horizon):
    with pytest.raises(UsageError):
        TrainingLoop(Subject({**loop(net(), sgd(net())), "horizon": horizon}))


def scheduled(make, lr, dtype=B16):
    model = net(dtype)
    optimizer = sgd(model, lr)
    scheduler = make(optimizer)
    x, y = data(dtype)

    def step(i):
        optimizer.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step}


LR = torch.optim.lr_scheduler


def test_a_warm_up_is_judged_at_its_largest_rate():
    (found,) = failures(scheduled(lambda o: LR.LambdaLR(o, lambda step: min(1.0, step / 100)), 1e-6))
    assert "at the largest learning rate, 1e-06" in found.message
    assert found.observed >= 0.9
    warm_up = scheduled(lambda o: LR.LambdaLR(o, lambda step: min(1.0, (step + 1) / 10**6)), 0.3)
    (tensor, *_) = (t for t in measured(warm_up).tensors if t.role == "parameter")
    assert tensor.share < 0.5 < tensor.lost / tensor.moved


@pytest.mark.parametrize(
    "make",
    [
        lambda o: LR.CosineAnnealingLR(o, 500),
        lambda o: LR.OneCycleLR(o, 0.3, total_steps=500),
        lambda o: LR.LambdaLR(o, lambda step: min(1.0, (step + 1) / 1000)),
        lambda o: LR.SequentialLR(o, [LR.LinearLR(o, 1e-4, 1.0, 100), LR.CosineAnnealingLR(o, 900)], [100]),
    ],
    ids=["cosine", "one cycle", "warm-up", "warm-up and cosine"],
)
def test_a_schedule_that_is_low_at_its_ends_passes(make):
    assert not judged_badly(scheduled(make, 0.3))


def test_what_is_in_16_bits_without_a_policy_is_judged_by_what_it_loses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32, momentum=0.001), nn.Linear(32, 4)).to(B16)
    x, y = data(B16)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(i):
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss.item()

    run = audit(
        {"model": model, "optimizer": adam, "step": step}, checks=("stagnation", "optimizer-state", "buffer-dtype")
    )
    failed = {finding.check for finding in run.findings if finding.verdict is Verdict.FAIL}
    assert failed == {"stagnation"}
    messages = [finding.message for finding in run.of(Verdict.FAIL)]
    assert sum("exp_avg_sq" in message for message in messages) == 1
    assert sum("running_" in message for message in messages) == 1
    skipped = [f.message for f in run.findings if f.verdict is Verdict.INCOMPLETE]
    assert len(skipped) == 2
    assert all("See stagnation" in message for message in skipped)
