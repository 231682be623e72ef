from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from narrow_loops import B16, F16, F32, kahan, loop, measure_stagnation, net, sgd, with_optimizer
from torch import nn

from ampcheck.core.subject import Subject
from ampcheck.facts.linear import Form, itself, mixed
from ampcheck.records.state import Role
from ampcheck.training.lineage import Lineage
from ampcheck.training.loop import LoopShadow, Resident, TrainingLoop
from ampcheck.training.stagnation.updates import UpdateWatch


def watched(tensor, change, role=Role.PARAMETER, steps=1):
    """The updates of one tensor that `change(tensor)` changes in place, or gives a new value that it returns."""
    shadow, lineage = LoopShadow(judge=False), Lineage()
    loop = TrainingLoop(Subject({"step": lambda i: None}))
    watch = UpdateWatch(shadow, lineage, steps)
    for _ in range(steps):
        shadow.renew(tensor)
        watch.begin([Resident(role, "it", tensor)], loop)
        with torch.no_grad(), shadow, lineage:
            new = change(tensor)
        tensor = tensor if new is None else new
        watch.end([Resident(role, "it", tensor)])
    return watch.tensors[role, "it"]


def _none(value):
    return None


@given(
    scale=st.floats(1e-6, 1e2),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([B16, F16]),
    alpha=st.sampled_from([1.0, -0.5, 1e-3]),
)
def test_the_lost_updates_are_those_that_a_sum_in_float64_says(scale, seed, dtype, alpha):
    generator = torch.Generator().manual_seed(seed)
    value, update = torch.randn(50, generator=generator).to(dtype), torch.randn(50, generator=generator).mul(scale)
    update = update.to(dtype)
    true = value.double() + alpha * update.double()
    rounded = value.clone().add_(update, alpha=alpha)
    moved = true.isfinite() & ((true - value.double()).abs() > 1e-12 * value.double().abs())
    account = watched(value.clone(), lambda one: _none(one.add_(update, alpha=alpha)))
    assert account.moved == int(moved.sum())
    assert account.lost == int((moved & (rounded == value)).sum())


def in_place(v, u):
    v.mul_(0.75)
    v.add_(u)


def foreach(v, u):
    torch._foreach_mul_([v], 0.75)
    torch._foreach_add_([v], [u])


def through_float32(v, u):
    v.copy_(v.float() * 0.75 + u.float())


def through_a_view(v, u):
    v.view(-1).mul_(0.75)
    v.t().add_(u.t())


def by_out(v, u):
    torch.add(v * 0.75, u, out=v)


def copied(v, u):
    v.copy_(v * 0.75 + u)


def new(v, u):
    return 0.75 * v + u


WAYS = [in_place, foreach, through_float32, through_a_view, by_out, copied, new]


@given(way=st.sampled_from(WAYS), seed=st.integers(0, 100))
def test_the_same_update_written_in_any_way_has_the_same_twin(way, seed):
    generator = torch.Generator().manual_seed(seed)
    value, update = torch.randn(6, 5, generator=generator).to(B16), torch.randn(6, 5, generator=generator).to(B16)
    account = watched(value.clone(), lambda one: way(one, update))
    old, _, moved, added, _ = account.samples[0]
    assert torch.equal(old, value.double().reshape(-1))
    assert torch.allclose(moved, (0.75 * value.double() + update.double() - value.double()).reshape(-1), atol=1e-14)
    assert torch.allclose(added, update.double().reshape(-1), atol=1e-14)
    assert account.gains == [0.75]


def test_the_gain_of_an_average_is_its_decay_however_it_is_written():
    target = torch.ones(8, dtype=B16)
    ways = [
        lambda one: _none(one.lerp_(target, 0.25)),
        lambda one: _none(one.mul_(0.75).add_(target, alpha=0.25)),
        lambda one: _none(one.add_(target - one, alpha=0.25)),
        lambda one: _none(one.sub_(0.25 * (one - target))),
        lambda one: 0.75 * one + 0.25 * target,
        lambda one: one.div(4).mul(3).addcmul(target, target, value=0.25),
        lambda one: _none(one.copy_((one.float() * 3 + target.float()) / 4)),
    ]
    for way in ways:
        assert watched(torch.full((8,), 0.5, dtype=B16), way, Role.COPY).gains == [0.75]


def test_a_tensor_that_is_given_a_value_anew_has_no_updates():
    wide = torch.full((4,), 0.1)
    for change in (lambda one: _none(one.copy_(wide)), lambda one: _none(one.fill_(0.1)), lambda one: wide.to(B16)):
        account = watched(torch.full((4,), 0.1, dtype=B16), change, Role.OTHER)
        assert (account.moved, account.overwritten) == (0, 1)


def test_a_slice_that_is_given_a_value_anew_has_lost_nothing():
    wide = torch.tensor(0.1)

    def change(one):
        one[1] = wide

    assert watched(torch.full((4,), 0.1, dtype=B16), change, Role.OTHER).lost == 0


def test_a_decay_on_its_own_is_told_with_the_elements_that_it_leaves():
    value = torch.tensor([1.0, 1.99, 0.0, -3.0], dtype=B16)
    account = watched(value, lambda one: _none(one.mul_(1 - 2**-9 - 2**-12)))
    assert (account.decay.looked, account.decay.factor) == (3, 1 - 2**-9 - 2**-12)
    exact = torch.tensor([1.0, 1.9921875, 0.0, -3.0], dtype=torch.float64)
    stuck = ((exact * account.decay.factor).to(B16).double() == exact) & (exact != 0)
    assert account.decay.stuck == int(stuck.sum()) > 0


@given(st.floats(-4, 4), st.floats(-4, 4))
def test_forms_are_linear(a, b):
    here, there, elsewhere = 1, 2, 4
    form = itself(here).times(a).plus(itself(there).times(2.0), b)
    assert (form.gain(here), form.gain(there), form.gain(elsewhere)) == (a, 2.0 * b, 0.0)
    forms = (form, itself(here).times(a), itself(here).plus(itself(here), b))
    assert [f.pure for f in forms] == [False, True, True]
    assert mixed((form, Form())).gain(here) is None


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=0.25), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x):
        return self.body(x)


def test_running_statistics_of_a_batch_norm_are_followed_under_autograd():
    torch.manual_seed(0)
    model = Norms().to(B16)
    stats = measure_stagnation(TrainingLoop(Subject(loop(model, sgd(model)))), 3)
    told = {one.name: one for one in stats.tensors}
    assert told["body.1.running_mean"].moved == 24
    assert told["body.1.running_mean"].averages


@settings(max_examples=8, deadline=None)
@given(kind=st.sampled_from(["sgd", "adam", "fused", "kahan", "norms", "adagrad"]), dtype=st.sampled_from([B16, F32]))
def test_a_watched_loop_computes_what_an_unwatched_one_does_and_is_put_back(kind, dtype):
    def make():
        if kind == "kahan":
            return with_optimizer(kahan, 1e-3, dtype)
        torch.manual_seed(0)
        model = Norms().to(dtype) if kind == "norms" else net(dtype)
        optimizers = {
            "adam": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2),
            "fused": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
            "adagrad": lambda: torch.optim.Adagrad(model.parameters(), lr=1e-2),
        }
        return loop(model, optimizers.get(kind, lambda: sgd(model))())

    parts, plain = make(), make()
    before = [p.detach().clone() for p in parts["model"].parameters()]
    seen = []

    class Heard(TrainingLoop):
        def take(self, number):
            seen.append(super().take(number))
            return seen[-1]

    torch.manual_seed(7)
    state = torch.get_rng_state()
    measure_stagnation(Heard(Subject(parts)), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == [plain["step"](i) for i in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(before, parts["model"].parameters(), strict=True))
