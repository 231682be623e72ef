"""How single things are put back: generators, globals, views, tensors without storage."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from training_loops import mlp, plainly

from ampcheck.core.errors import UsageError
from ampcheck.torchtools.reachable import reach
from ampcheck.torchtools.snapshot import preserved

counted = 0


def test_globals_that_a_step_counts_in_are_undone():
    def step(number):
        global counted
        counted += 1
        return 0.0

    with preserved(reach({"model": mlp(), "step": step})):
        step(0)
        assert counted == 1
    assert counted == 0


def test_generators_of_random_numbers_go_back_the_users_own_among_them():
    own, python, modern = torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)

    def step(number):
        drawn = torch.rand(1).item(), np.random.rand(), random.random()
        return (*drawn, torch.rand(1, generator=own).item(), python.random(), modern.random())

    with preserved(reach({"model": mlp(), "step": step})):
        first = step(0)
    assert step(0) == first


def test_a_snapshot_is_restored_as_often_as_asked_and_bit_for_bit():
    model = mlp()
    odd = torch.tensor([float("nan"), -0.0, 0.0, float("inf")])
    alone = torch.tensor(-0.0)
    signs = {"model": model, "odd": odd, "alone": alone}

    def step(number):
        odd.zero_()
        alone.abs_()
        model[0].weight.data.zero_()
        return 0.0

    before = plainly(signs)
    with preserved(reach({**signs, "step": step})) as snapshot:
        for number in range(3):
            step(number)
            assert plainly(signs) != before
            snapshot.restore()
            assert plainly(signs) == before


def test_a_model_without_storage_is_undone():
    model = nn.Linear(2, 2, device="meta")
    kept = model.weight

    def step(number):
        model.weight = nn.Parameter(torch.zeros(2, 2))
        return 0.0

    with preserved(reach({"model": model, "step": step})):
        step(0)
    assert model.weight is kept


def test_expanded_views_and_tensors_of_inference_mode_are_undone():
    base = torch.arange(3.0)
    shown = base.expand(4, 3)
    with torch.inference_mode():
        sums = torch.zeros(2)

    def step(number):
        base.add_(1)
        with torch.inference_mode():
            sums.add_(1)
        return float(shown.sum())

    before = plainly([base, shown, sums])[1]
    with preserved(reach({"model": mlp(), "step": step})):
        step(0)
        assert plainly([base, shown, sums])[1] != before
    assert plainly([base, shown, sums])[1] == before


def test_views_of_one_buffer_are_undone_and_stay_views():
    model, flat = mlp(), torch.zeros(16 * 16)
    model[0].weight.data = flat.view(16, 16)

    def step(number):
        flat.add_(1)
        model[0].weight.data = model[0].weight.data * 2
        return 0.0

    with preserved(reach({"model": model, "step": step})):
        step(0)
    assert not model[0].weight.any()
    flat.add_(1)
    assert model[0].weight.eq(1).all()


def test_a_lazy_module_that_never_ran_is_a_usage_error():
    with pytest.raises(UsageError, match="run the model once"):
        preserved(reach({"model": nn.LazyLinear(3)})).__enter__()


def test_casts_that_autocast_keeps_of_other_weights_are_dropped():
    model, data = mlp(), torch.ones(2, 16)
    torch.set_autocast_dtype("cpu", torch.bfloat16)

    def out():
        torch.set_autocast_enabled("cpu", True)  # no region, at whose end PyTorch would drop them
        try:
            return model(data)
        finally:
            torch.set_autocast_enabled("cpu", False)

    torch.clear_autocast_cache()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(data)
    with preserved(reach({"model": model})):
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        assert not torch.equal(out(), expected)
    assert torch.equal(out(), expected)
    torch.clear_autocast_cache()
