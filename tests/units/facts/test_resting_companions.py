"""Companions of data cost nothing until an op uses them, and what lives from step to step takes less memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampcheck.facts.moves import MOVE
from ampcheck.facts.sides import Entering, Resting, Values
from ampcheck.facts.values import CompanionStore
from ampcheck.shadow import Shadow


def test_data_have_no_memory_until_they_are_used_and_are_moved_as_in_the_order_in_which_they_entered():
    tensors = torch.randn(3, 1000)
    moved = []
    for order in ((0, 1), (1, 0)):
        store = CompanionStore()
        first, second = tensors[0].clone(), tensors[1].clone()
        entered = [store.of(first), store.of(second)]
        assert store.nbytes() == 0
        for i in order:
            entered[i].fill()
        moved.append([store.moved(first), store.moved(second)])
        assert torch.equal(store.exact(first), first.double())
        assert torch.allclose((store.moved(first) / first - 1).abs(), torch.tensor(MOVE), rtol=1e-3)
    assert all(map(torch.equal, *moved))


def test_an_op_that_overwrites_data_takes_their_values_from_before():
    x = torch.ones(2000)
    with Shadow() as shadow:
        x.mul_(3.0).add_(0.5)
    assert torch.equal(shadow.exact(x), torch.full((2000,), 3.5, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 1 << 17])
def test_values_that_rested_are_as_before(size: int):
    exact = torch.randn(size, dtype=torch.float64)
    moved = (exact * (1 + MOVE * torch.randn(size))).float()
    exact[0], moved[0] = torch.inf, torch.inf
    values = Resting(Values(exact, moved.clone())).values(moved)
    assert torch.equal(values.exact, exact)
    assert values.moved[0] == torch.inf
    apart, before = values.moved[1:] - exact[1:], moved[1:] - exact[1:]
    assert ((apart - before).abs() <= 2.0**-8 * before.abs() + 2.0**-23 * exact[1:].abs()).all()
    data = Entering(size, None).values(moved)
    assert torch.equal(Resting(data).values(moved).moved, moved)


def test_companions_of_a_training_with_adam_take_at_most_eight_times_the_weights():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)), torch.randn(8, 64)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Shadow() as shadow:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
        del loss
    assert shadow.store.nbytes() <= 8 * sum(p.nbytes for p in model.parameters())
