"""What a step changes is afterwards as it was, to the bit and the object."""

from __future__ import annotations

import types
from collections import Counter, defaultdict, deque
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from training_loops import amp_loop, mlp, plainly, state_of

from ampcheck.core.subject import Subject
from ampcheck.torchtools.reachable import reach
from ampcheck.torchtools.saving import same_bits
from ampcheck.torchtools.snapshot import preserved
from ampcheck.training.loop import TrainingLoop


class Interrupted(BaseException):
    """What an interrupt of the user's is like."""


def steps_are_undone(shape: dict[str, Any], *more: Any, steps: int = 2, raising: bool = False) -> None:
    """Run steps inside `preserved()`; what is named in the mapping, and `more`, must be as before."""
    loop = TrainingLoop(Subject(shape))
    before = state_of(shape), plainly(list(more))[1]
    with suppress(Interrupted), loop.preserved():
        for number in range(steps):
            shape["step"](number)
        assert (state_of(shape), plainly(list(more))[1]) != before, "the steps did nothing"
        if raising:
            raise Interrupted
    assert (state_of(shape), plainly(list(more))[1]) == before


def trained(model: nn.Module, optimizer: Any, scaler: Any = None, **more: Any) -> dict[str, Any]:
    data = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(data).float().square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return float(loss.detach())

    return {"model": model, "optimizer": optimizer, **({"scaler": scaler} if scaler else {}), "step": step, **more}


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("raising", [False, True])
@pytest.mark.parametrize("began", [False, True])
def test_a_step_in_mixed_precision_is_undone(began, raising):
    shape = amp_loop()
    if began:  # gradients, the scale and the state of the optimizer exist already
        shape["step"](0)
    steps_are_undone(shape, raising=raising)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.integers(0, 2),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 99),
)
def test_any_optimizer_is_undone_at_any_time(name, began, steps, norm, scaled, dtype, seed):
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(16) if norm else nn.Dropout(0.3)
    model = nn.Sequential(nn.Linear(16, 16), middle, nn.Tanh(), nn.Linear(16, 2))
    if dtype is not torch.float32 and not name.endswith("fused"):
        model.to(dtype)
        model.register_forward_pre_hook(lambda module, args: (args[0].to(dtype),))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1) if scaled else None
    optimizer = OPTIMIZERS[name](model.parameters())
    shape = trained(model, optimizer, scaler)
    for number in range(began):
        shape["step"](number)
    steps_are_undone(shape, steps=steps)


def test_lbfgs_with_its_history_is_undone():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, history_size=3)
    data = torch.randn(8, 16)

    def step(number):
        def closure():
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    shape = {"model": model, "optimizer": optimizer, "step": step}
    steps_are_undone(shape)
    step(0)
    steps_are_undone(shape)


@pytest.mark.parametrize("cast", ["half", "double", "bfloat16"])
def test_a_change_of_dtype_is_undone_in_the_same_objects(cast):
    shape = trained(mlp(), None)
    model = shape["model"]
    model(torch.ones(1, 16)).sum().backward()

    def step(number):
        getattr(model, cast)()
        return 0.0

    steps_are_undone({"model": model, "step": step}, list(model.parameters()))


def test_parameters_and_modules_that_are_replaced_come_back():
    model = mlp()
    storage = [one.data_ptr() for one in model.parameters()]

    def step(number):
        model[0].weight = nn.Parameter(torch.zeros(16, 16))
        model[0].bias.data = model[0].bias.data + 1
        model[1] = nn.ReLU()
        model.eval()
        model[2].weight.requires_grad_(False)
        model[2].extra = torch.ones(2)
        model.register_buffer("late", torch.ones(3))
        return 0.0

    shape = {"model": model, "step": step}
    parts = list(model.modules())
    steps_are_undone(shape)
    assert all(a is b for a, b in zip(parts, model.modules(), strict=True))
    assert storage == [one.data_ptr() for one in model.parameters()]
    assert not hasattr(model[2], "extra")


def test_what_a_module_holds_besides_its_weights_is_undone():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 1)
            self.seen, self.table, self._log = 0, {"calls": [0]}, []
            self.running = torch.zeros(2)
            self.register_buffer("mean", torch.zeros(1))

        def forward(self, x):
            self.seen += 1
            self.table["calls"][0] += 1
            self._log.append(self.seen)
            self.running += 1
            self.mean.lerp_(x.mean(), 0.5)
            return self.linear(x)

    model = Counting()
    steps_are_undone(trained(model, torch.optim.SGD(model.parameters(), lr=0.1)))


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR of 2.6 passes it itself
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[2],
        ),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler(
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], o
        ),
    ],
)
def test_schedulers_and_those_inside_them_are_undone(make):
    shape = trained(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1))
    model = shape["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    inner = list(getattr(scheduler, "_schedulers", ()))

    def step(number):
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        return 0.0

    steps_are_undone({"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step}, *inner, steps=4)


class Sharpness(torch.optim.Optimizer):
    """An optimizer around another one, as those that look for flat minima are."""

    def __init__(self, params, base):
        super().__init__(params, {"rho": 0.05})
        self.base = base(self.param_groups, lr=0.1)
        self.history = deque(maxlen=4)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
        self.history.append(1)
        self.base.step()


def test_an_optimizer_inside_another_is_undone():
    model = mlp()
    optimizer = Sharpness(model.parameters(), torch.optim.Adam)
    shape = trained(model, optimizer)
    steps_are_undone(shape, optimizer.base)
    shape["step"](0)
    steps_are_undone(shape, optimizer.base)


def test_what_closures_containers_and_objects_hold_is_undone():
    class Trainer:
        def __init__(self):
            self.count, self.losses, self.model = 0, [], mlp()
            self.ema = [one.detach().clone() for one in self.model.parameters()]
            self.log = defaultdict(list)
            self.recent, self.kinds, self.met = deque([1.0], maxlen=3), Counter(), {0}
            self.space = types.SimpleNamespace(best=1.0)
            self.array = np.zeros(3)

    trainer = Trainer()
    total, nested = 0, {"a": [1, {"b": torch.zeros(2)}]}

    def step(number):
        nonlocal total
        total += 1
        trainer.count += 1
        trainer.losses.append(trainer.count)
        trainer.late = 1
        nested["a"][1]["b"] += 1
        nested["new"] = 1
        trainer.log["loss"].append(1.0)
        trainer.recent.append(2.0)
        trainer.kinds["x"] += 1
        trainer.met.add(number + 1)
        trainer.space.best = 2.0
        trainer.array += 1
        for shadow in trainer.ema:
            shadow.mul_(0.5)
        return 0.0

    def seen():
        return plainly([total, nested, vars(trainer) | {"space": vars(trainer.space)}])[1]

    before = seen()
    with preserved(reach({"step": step})):
        step(0)
        step(1)
        assert seen() != before
    assert seen()[:2] == before[:2]
    assert seen()[2][1] == before[2][1]


def test_gradients_are_the_same_objects_also_sparse_ones_and_those_set_to_none():
    table, model = nn.Embedding(5, 3, sparse=True), mlp()
    table(torch.tensor([1, 2])).sum().backward()
    model(torch.ones(1, 16)).sum().backward()
    optimizer = torch.optim.SGD([*table.parameters(), *model.parameters()], lr=0.1)

    def step(number):
        optimizer.step()
        optimizer.zero_grad(set_to_none=number == 0)
        table(torch.tensor([3])).sum().backward()
        return 0.0

    steps_are_undone({"models": [table, model], "optimizer": optimizer, "step": step})


def test_what_is_reached_stands_once_and_under_its_owner():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    holder = {"inner": model[0], "weight": model[2].weight, "free": torch.ones(1)}

    def step(number):
        return optimizer, holder, scheduler

    found = reach({"scheduler": scheduler, "model": model, "optimizer": optimizer, "step": step})
    assert list(found.modules) == ["model"]
    assert list(found.optimizers) == ["optimizer"]
    assert list(found.tensors) == ["holder.free"]


def test_same_bits_compares_bits_and_nan_equals_nan():
    nan, zero = torch.tensor(float("nan")), torch.tensor(0.0)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
