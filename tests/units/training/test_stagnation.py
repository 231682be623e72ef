from __future__ import annotations

import copy
import math

import narrow_loops
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from narrow_loops import (
    B16,
    F16,
    F32,
    data,
    ema_loop,
    failures,
    in_backward,
    judged,
    loop,
    measured,
    net,
    sgd,
    with_optimizer,
)
from torch import nn

from ampcheck.checks.training.stagnation import check as check_stagnation
from ampcheck.core.limits import Limits
from ampcheck.core.run import Verdict
from ampcheck.records.stagnation import Decay, StagnationStats, TensorUpdates
from ampcheck.training.stagnation.stagnation import stagnation_tables


def adamw(dtype=B16, lr=2e-2, betas=(0.9, 0.95), weight_decay=0.0, **more):
    model = net(dtype)
    return loop(model, torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay, **more))


KERNELS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_learning_rate_below_the_spacing_is_found(kernel):
    (found,) = failures(adamw(lr=1e-6, **kernel))
    assert "parameters" in found.message
    assert found.where.module in ("0", "2")
    assert found.observed >= 0.9
    assert "float32 master weights" in found.hint
    assert "Kahan summation" in found.hint


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_updates_that_move_the_weights_pass_with_their_number(kernel):
    (found,) = judged(adamw(**kernel))
    assert found.verdict is Verdict.PASS
    assert "updates of their elements" in found.message


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_beta2_that_cannot_decay_is_found_in_the_first_steps(kernel):
    (found,) = failures(adamw(betas=(0.9, 0.999), **kernel))
    assert "exp_avg_sq" in found.message
    assert "0.999" in found.message


@pytest.mark.parametrize("kernel", KERNELS[:2], ids=str)
def test_a_weight_decay_that_cannot_move_is_found_where_the_updates_move(kernel):
    (found,) = failures(adamw(weight_decay=1e-2, **kernel))
    assert "weight decay" in found.message
    assert found.observed == 1.0


def test_a_fused_weight_decay_is_rounded_with_the_update_and_is_not_lost():
    assert not failures(adamw(weight_decay=1e-2, fused=True))


@pytest.mark.parametrize("change", [narrow_loops.decoupled_decay, narrow_loops.decay_by_itself])
def test_a_weight_decay_by_hand_that_cannot_move_is_found(change):
    (found,) = failures(with_optimizer(change, 0.3))
    assert "by 0.9999 leaves" in found.message


def test_a_weight_decay_that_rides_on_the_gradient_is_not_lost():
    model = net()
    assert not failures(loop(model, sgd(model, weight_decay=1e-4)))


@pytest.mark.parametrize("change", narrow_loops.KEEP_UPDATES)
def test_updates_that_are_kept_elsewhere_or_rounded_at_random_are_not_lost(change):
    found = judged(with_optimizer(change, 1e-4))
    assert [one.verdict for one in found] == [Verdict.PASS]


def test_what_a_compensation_carries_is_counted():
    stats = measured(with_optimizer(narrow_loops.kahan, 1e-4))
    weight = next(one for one in stats.tensors if one.name == "0.weight")
    assert weight.carried > 0.9 * weight.moved
    assert weight.carriers == {"0.weight.compensation"}
    assert next(one for one in stats.tensors if one.name == "0.weight.compensation").compensates


def test_a_small_update_of_random_numbers_is_no_stochastic_rounding():
    (found,) = failures(with_optimizer(narrow_loops.random_update, 1e-5))
    assert "parameters" in found.message


def test_master_weights_that_the_optimizer_steps_carry_the_updates():
    model = net()
    masters = [p.detach().float().clone() for p in model.parameters()]
    parts = loop(model, torch.optim.AdamW(masters, lr=1e-4))
    x, y = data(B16)

    def step(i):
        model.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        for wide, p in zip(masters, model.parameters(), strict=True):
            wide.grad = p.grad.float()
        parts["optimizer"].step()
        with torch.no_grad():
            for wide, p in zip(masters, model.parameters(), strict=True):
                p.copy_(wide)
        return loss.item()

    assert not failures({**parts, "step": step})


@pytest.mark.parametrize("follow", narrow_loops.EMAS)
def test_an_average_in_bfloat16_that_cannot_follow_is_found(follow):
    found = failures(ema_loop(follow))
    assert found
    assert all("copies ema" in one.message for one in found)


def test_an_average_that_starts_at_zero_is_found_before_it_stops():
    model = net(F32)
    shadow = {name: torch.zeros_like(p, dtype=B16) for name, p in model.named_parameters()}

    def after(i, loss):
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow[name] = 0.999 * shadow[name] + 0.001 * p.to(B16)

    (found,) = failures(loop(model, sgd(model, 0.1), after, shadow=shadow))
    assert "copies shadow." in found.message
    assert "stands still after about" in found.message


def test_a_weighted_average_of_torch_is_found():
    model = net()
    follow = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9995)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=follow)
    average.n_averaged.fill_(1)
    assert failures(loop(model, sgd(model), lambda i, loss: average.update_parameters(model), ema=average))


@pytest.mark.parametrize("parts", [(narrow_loops.ema_fast, B16), (narrow_loops.hard_copy, B16)], ids=["fast", "hard"])
def test_a_fast_average_and_a_hard_copy_pass(parts):
    assert not failures(ema_loop(*parts))


@pytest.mark.parametrize("follow", narrow_loops.EMAS)
def test_an_average_in_float32_passes(follow):
    (found,) = judged(ema_loop(follow, F32))
    assert found.verdict is Verdict.PASS
    assert "none of the" in found.message


@pytest.mark.parametrize("kernel", KERNELS[:2], ids=str)
def test_an_eps_that_is_zero_in_float16_is_found_with_its_name(kernel):
    found = [one for one in failures(adamw(F16, **kernel)) if "eps" in one.message]
    assert len(found) == 1
    assert "1e-08" in found[0].message
    assert "6e-08" in found[0].hint


@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_an_eps_that_float16_holds_and_none_at_all_pass(eps):
    assert not any("eps" in one.message for one in failures(adamw(F16, eps=eps)))


def test_a_fused_kernel_adds_its_eps_in_float32():
    assert not any("eps" in one.message for one in failures(adamw(F16, fused=True)))


def test_a_layer_norm_whose_weights_stand_at_one_is_found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)).to(B16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    (found,) = failures(loop(model, optimizer))
    assert found.where.module == "1"


def test_a_bias_whose_gradient_is_only_rounding_does_not_fail():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).to(B16)
    assert not failures(loop(model, sgd(model)))


def test_an_optimizer_that_steps_in_backward_is_followed():
    assert failures(in_backward(1e-5))
    assert not failures(in_backward(0.3))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_frozen_weights_and_a_learning_rate_of_zero_lose_nothing(rate):
    model = net()
    model[0].requires_grad_(False)
    (found,) = judged(loop(model, sgd(model, rate)))
    assert found.verdict is (Verdict.PASS if rate else Verdict.SKIP)  # without a rate nothing is updated


def test_a_warm_up_from_zero_passes():
    model = net()
    optimizer = sgd(model, 0.0)

    def after(i, loss):
        optimizer.param_groups[0]["lr"] = 0.1 * (i + 1)

    assert not failures(loop(model, optimizer, after))


def test_sparse_gradients_are_followed():
    def made(lr):
        torch.manual_seed(0)
        table = nn.Embedding(20, 8, sparse=True).to(B16)
        optimizer = sgd(table, lr)

        def step(i):
            optimizer.zero_grad()
            loss = table(torch.tensor([1, 2, 3])).float().square().sum()
            loss.backward()
            optimizer.step()
            return loss.item()

        return {"model": table, "optimizer": optimizer, "step": step}

    assert not failures(made(1.0))
    assert failures(made(1e-5))


def test_two_models_with_an_optimizer_each_are_told_apart():
    one, other = net(), net()
    first, second = sgd(one), sgd(other, 1e-5)
    x, y = data(B16)

    def step(i):
        for model, optimizer in ((one, first), (other, second)):
            optimizer.zero_grad()
            loss = (model(x) - y).float().square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    (found,) = failures({"one": one, "other": other, "first": first, "second": second, "step": step})
    assert "other." in found.message
    assert "one." not in found.message


def test_a_loop_under_autocast_with_float32_weights_passes_and_says_what_was_looked_at():
    model = net(F32)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    x, y = data(F32)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", F16):
            loss = (model(x) - y).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    (found,) = judged({"model": model, "optimizer": optimizer, "scaler": scaler, "step": step})
    assert found.verdict is Verdict.PASS
    assert "narrower than float32 (4 steps)" in found.message


def test_a_step_that_raises_ends_the_measurement_and_the_loop_is_put_back():
    parts = adamw(lr=1e-6)
    before = copy.deepcopy(parts["model"].state_dict())
    whole = parts["step"]

    def step(i):
        if i == 2:
            raise RuntimeError("no more data")
        return whole(i)

    stats = measured({**parts, "step": step})
    assert (stats.steps, "no more data" in stats.error) == (2, True)
    assert all(torch.equal(before[name], value) for name, value in parts["model"].state_dict().items())
    assert not parts["optimizer"].state


def test_no_step_at_all_is_a_skip_with_the_reason():
    def step(i):
        raise RuntimeError("no data")

    (found,) = judged({**adamw(), "step": step})
    assert found.verdict is Verdict.SKIP
    assert "no data" in found.message


def test_updates_that_are_not_seen_are_a_skip():
    stats = StagnationStats("loop", 3, 4, 2, (TensorUpdates("parameter", "w", "bfloat16", 4, 0, 0),))
    stats.coverage.unseen["changes"] = 6  # type: ignore[index]
    (found,) = check_stagnation(stats, Limits())
    assert found.verdict is Verdict.SKIP


@given(moved=st.integers(2, 10_000), share=st.floats(0, 1), limit=st.floats(0.6, 1))
def test_the_verdict_follows_the_limit(moved, share, limit):
    lost = math.floor(share * moved)
    one = TensorUpdates("parameter", "w", "bfloat16", 4, moved, lost, steps=3)
    (found,) = check_stagnation(StagnationStats("loop", 3, 1, 1, (one,)), Limits(stagnation=limit))
    wanted = Verdict.FAIL if lost / moved >= limit else Verdict.WARN if lost / moved > 0.5 else Verdict.PASS
    assert found.verdict is wanted


def test_the_table_holds_every_tensor():
    (table,) = stagnation_tables(measured(adamw(lr=1e-6)))
    assert len(table.rows) == 14
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert stagnation_tables(StagnationStats("loop", 3, 1, 0)) == ()


def test_decays_add_up():
    assert Decay() + Decay(0.9, 10, 4, "mul") + Decay(0.8) + Decay(0.7, 10, 1, "mul") == Decay(0.7, 20, 5, "mul")
