"""Hooks that a step registers do not outlive it, and those that it removes come back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training_loops import mlp

from ampcheck.core.subject import as_subject
from ampcheck.torchtools.reachable import reach
from ampcheck.torchtools.saving import MODULE_TABLES, TENSOR_TABLES
from ampcheck.torchtools.snapshot import Snapshot, preserved
from ampcheck.training.gradients.watch import captured
from ampcheck.training.loop import TrainingLoop
from ampcheck.training.observed import observe

OF_MODULES = {
    "register_forward_hook": {"with_kwargs": True, "always_call": True},
    "register_forward_pre_hook": {"with_kwargs": True},
    "register_full_backward_hook": {},
    "register_full_backward_pre_hook": {},
    "register_state_dict_pre_hook": {},
    "register_state_dict_post_hook": {},
    "register_load_state_dict_pre_hook": {},
    "register_load_state_dict_post_hook": {},
}
OF_TENSORS = ("register_hook", "register_post_accumulate_grad_hook")


def nothing(*args, **kwargs):
    return None


def tables(module):
    return {name: dict(vars(module)[name]) for name in (*MODULE_TABLES,)}


def register_all(module):
    found = []
    for name, kwargs in OF_MODULES.items():
        if hasattr(module, name):
            found.append(getattr(module, name)(nothing, **kwargs))
    return found + [getattr(module.weight, name)(nothing) for name in OF_TENSORS]


def test_every_kind_of_hook_stands_in_a_table_that_is_put_back():
    layer = nn.Linear(2, 2)
    register_all(layer)
    assert all(vars(layer)[name] for name in MODULE_TABLES), "a table without a hook"
    assert all(getattr(layer.weight, name) for name in TENSOR_TABLES)
    known = {name for name, one in vars(layer).items() if "hook" in name and isinstance(one, dict)}
    assert known == set(MODULE_TABLES)


def test_hooks_that_a_step_registers_are_gone():
    model = mlp()
    before = tables(model[0]), model[0]._is_full_backward_hook
    with preserved(reach({"model": model})):
        register_all(model[0])
    assert (tables(model[0]), model[0]._is_full_backward_hook) == before
    assert model[0].weight._backward_hooks is None
    assert model[0].weight._post_accumulate_grad_hooks is None
    model(torch.ones(1, model[0].in_features)).sum().backward()


def test_hooks_that_a_step_removes_come_back_in_their_order():
    model = mlp()
    heard = []
    handles = [model[0].register_forward_hook(lambda *_, n=n: heard.append(n)) for n in range(3)]
    handles.append(model[0].weight.register_hook(lambda grad: heard.append("grad")))
    with preserved(reach({"model": model})):
        for handle in handles[1:]:
            handle.remove()
        model[0].register_forward_hook(lambda *_: heard.append("new"))
    model(torch.ones(1, model[0].in_features)).sum().backward()
    assert heard == [0, 1, 2, "grad"]
    for handle in handles:
        handle.remove()
    assert not model[0]._forward_hooks
    assert not model[0].weight._backward_hooks


@pytest.mark.parametrize("inside", [False, True])
def test_our_own_hooks_neither_go_nor_come_back(inside):
    model = mlp()
    loop = TrainingLoop(as_subject({"model": model, "step": lambda number: 0.0}))
    seen = []

    def step():
        model[0].register_forward_hook(nothing)
        model[0].weight.register_hook(nothing)
        model(torch.ones(1, model[0].in_features)).sum().backward()

    outer = Snapshot(loop.reached)
    with captured(loop, lambda name, grad: seen.append(name)):
        snapshot = Snapshot(loop.reached) if inside else outer
        step()
        first, seen[:] = list(seen), []
        snapshot.restore()
        step()
        assert seen
        assert len(seen) == len(first)
    snapshot.restore()
    assert not model[0]._forward_hooks
    assert not model[0].weight._backward_hooks


class OnlyOne(torch.autograd.Function):
    """Passes the gradient of its first input on, and has none for the others."""

    @staticmethod
    def forward(ctx, first, *others):
        return first + sum(others)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *(None,) * (len(ctx.needs_input_grad) - 1)


@pytest.mark.parametrize("within", [False, True], ids=["a parameter", "the output of a module"])
def test_a_backward_that_returns_no_gradient_is_no_error(within):
    model = nn.ModuleDict({"layer": nn.Linear(4, 4), "side": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(2, 4)

    def step(number):
        optimizer.zero_grad()
        other = model["side"](data) if within else model["side"].bias
        loss = OnlyOne.apply(model["layer"](data), other).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    seen = observe(TrainingLoop(as_subject({"model": model, "optimizer": optimizer, "step": step})), 2)
    assert seen.stopped is None
    assert model["side"].bias.grad is None
    assert {loss.name for loss in seen.gradients.gradients} >= {"layer.weight", "layer.bias"}
    assert not any("side" in loss.name for loss in seen.gradients.gradients)
