"""State of a step that is neither weight nor closure: slots, objects in modules, classes, functions, switches."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn
from training_loops import mlp

from ampcheck.core.subject import as_subject
from ampcheck.torchtools.closures import rebound, walk
from ampcheck.torchtools.reachable import reach
from ampcheck.torchtools.snapshot import preserved
from ampcheck.training.loop import TrainingLoop


@dataclasses.dataclass(slots=True)
class Slotted:
    average: torch.Tensor
    count: int = 0
    late: list = dataclasses.field(init=False)


@dataclasses.dataclass(slots=True, frozen=True)
class Frozen:
    model: nn.Module


class Queue:
    def __init__(self):
        self.count, self.rows = 0, torch.zeros(3)


class Counting:
    count = 0
    rows = torch.zeros(2)
    seen: ClassVar = []


class Named(list):
    """A list with an attribute."""


def test_what_slots_hold_is_undone():
    state = Slotted(torch.zeros(4))
    average = state.average
    with preserved(reach({"model": mlp(), "state": state})) as snapshot:
        for _ in range(2):
            state.average.add_(1)
            state.average, state.count, state.late = torch.ones(4), 3, [1]
            snapshot.restore()
            assert not hasattr(state, "late")
    assert state.average is average
    assert state.count == 0
    assert not average.any()


def test_a_module_in_slots_is_found_and_replaced():
    model = nn.Linear(2, 2)
    frozen = Frozen(model)

    def forward(x):
        return frozen.model(x)

    assert model in walk(forward)
    assert list(reach({"step": forward}).modules.values()) == [model]
    other = nn.Linear(2, 2)
    twin = rebound(forward, lambda module: other)
    inputs = torch.ones(1, 2)
    assert torch.equal(twin(inputs), other(inputs))
    assert frozen.model is model


@pytest.mark.parametrize("place", ["attribute", "list", "part"])
def test_objects_inside_a_module_are_undone(place):
    model, queue = mlp(), Queue()
    if place == "attribute":
        model.queue = queue
    elif place == "list":
        model.queues = [queue]
    else:
        model[0].queue = queue
    rows, teacher = queue.rows, nn.Linear(2, 2)
    model.others = [teacher]  # kept from being a part
    weight = teacher.weight.detach().clone()
    with preserved(reach({"model": model})):
        queue.rows += 1
        queue.rows, queue.count = torch.ones(3), 1
        teacher.weight.data.zero_()
    assert queue.rows is rows
    assert (queue.count, rows.sum().item()) == (0, 0.0)
    assert torch.equal(teacher.weight, weight)


def test_what_is_inside_modules_is_put_back_and_not_judged():
    model = mlp()
    model.queue = Queue()
    loop = TrainingLoop(as_subject({"model": model, "step": lambda number: 0.0}))
    assert not loop.reached.tensors
    assert not [one for one in loop.residents() if one.tensor is model.queue.rows]


@pytest.mark.parametrize("through", ["object", "name"])
def test_attributes_of_the_users_classes_are_undone(through):
    counter = Counting()

    def by_object(number):
        type(counter).count += 1
        change(type(counter))

    def by_name(number):
        Counting.count += 1
        change(Counting)

    def change(kind):
        kind.new = 1
        kind.seen.append(1)
        kind.rows.add_(1)

    with preserved(reach({"model": mlp(), "step": by_object if through == "object" else by_name})):
        (by_object if through == "object" else by_name)(0)
        assert Counting.count == 1
    assert (Counting.count, Counting.seen, Counting.rows.sum().item()) == (0, [], 0.0)
    assert not hasattr(Counting, "new")


def test_attributes_of_functions_and_of_lists_are_undone():
    named = Named([1])

    def step(number):
        step.calls = getattr(step, "calls", 0) + 1
        named.append(2)
        named.calls = 1

    with preserved(reach({"model": mlp(), "step": step})):
        step(0)
    assert not hasattr(step, "calls")
    assert named == [1]
    assert not hasattr(named, "calls")


def test_things_of_one_name_in_two_closures_are_both_undone():
    def make():
        total = torch.zeros(2)

        def add():
            total.add_(1)
            return total

        return add

    one, other = make(), make()
    with preserved(reach({"model": mlp(), "step": lambda number: (one(), other())})):
        one(), other()
    assert torch.equal(one(), torch.ones(2))
    assert torch.equal(other(), torch.ones(2))


def test_switches_of_pytorch_are_undone():
    before = torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    with preserved(reach({"model": mlp()})):
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_autocast_enabled("cpu", True)
    after = torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    assert after == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_goes_on_as_it_is_is_named(tmp_path):
    model, numbers = mlp(), iter(range(9))
    model.loader = iter(torch.utils.data.DataLoader(torch.arange(4)))
    with (tmp_path / "log").open("w") as log:

        def step(number):
            log.write(str(next(numbers)))

        opaque = reach({"model": model, "step": step, "rows": [1, 2], "queue": Queue()}).opaque
    assert opaque == {
        "log": "TextIOWrapper",
        "numbers": "range_iterator",
        "model.loader": "_SingleProcessDataLoaderIter",
    }


class Lazy(dict):
    """As the mappings of Transformers, whose values are imported when they are asked for."""

    def items(self):
        raise ValueError("could not be imported")

    keys = values = __iter__ = items


def test_a_dictionary_that_computes_its_items_is_not_asked_for_them():
    network = mlp()
    reached = reach({"held": Lazy(net=network)})
    assert list(reached.modules.values()) == [network]
