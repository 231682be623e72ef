"""Nested snapshots share the copies of what did not change between them, and only those."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import nn
from training_loops import mlp

from ampcheck.torchtools import saving
from ampcheck.torchtools.reachable import reach
from ampcheck.torchtools.snapshot import Snapshot, preserved


def copies(tensor):
    return [one for one in gc.get_objects() if type(one) is saving._Copy and one.of() is tensor]


def test_data_that_no_step_writes_is_copied_once_for_all_nested_snapshots():
    data = torch.arange(12.0).reshape(3, 4).T
    reached = reach({"model": mlp(), "data": data})
    with preserved(reached), preserved(reached), preserved(reached):
        assert len(copies(data)) == 1
        assert len(copies(reached.modules["model"][0].weight)) == 1
    assert not copies(data)


@pytest.mark.parametrize("write", ["in place", "data", "numpy", "set"])
def test_every_snapshot_goes_back_to_its_own_time_however_it_was_written(write):
    values = torch.zeros(4)
    reached = reach({"model": mlp(), "values": values})
    taken = []
    for number in range(3):
        if write == "in place":
            values.fill_(number)
        elif write == "data":
            values.data.fill_(number)
        elif write == "numpy":
            np.asarray(values)[:] = number
        else:
            values.data = torch.full((4,), float(number))
        taken.append(Snapshot(reached))
    for number in (2, 0, 1, 2, 0):
        taken[number].restore()
        assert torch.equal(values, torch.full((4,), float(number)))


def test_bits_decide_and_not_values():
    zeros = torch.zeros(4)
    reached = reach({"model": mlp(), "zeros": zeros})
    first = Snapshot(reached)
    zeros.neg_()
    second = Snapshot(reached)
    first.restore()
    assert not zeros.signbit().any()
    second.restore()
    assert zeros.signbit().all()


def test_the_same_bits_in_another_format_are_not_shared():
    model = nn.Linear(2, 2, bias=False)
    model.weight.data.zero_()
    reached = reach({"model": model})
    first = Snapshot(reached)
    model.weight.data = torch.zeros(2, 2, dtype=torch.bfloat16)
    second = Snapshot(reached)
    for snapshot, dtype in ((first, torch.float32), (second, torch.bfloat16), (first, torch.float32)):
        snapshot.restore()
        assert model.weight.dtype is dtype
