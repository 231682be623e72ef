"""Odd subjects of mixed sorts: what comes back is no result, gradients go astray, NaN hides, batches are too small."""

from __future__ import annotations

import functools
import itertools
import math
import random
import warnings
from typing import Any

import torch
from odd_rows import PASSES, Base, add, fails, given, incomplete, module, refused, warns
from torch import nn

from ampcheck import Subject

NAN, INF = float("nan"), float("inf")
TICKS = itertools.count(1)
"""A clock: every run of a forward reads another number."""

UNTRAINED = incomplete("nonfinite-gradient", phrase="no gradients to judge")


class _Alias(torch.autograd.Function):
    """Gives its input under another name; its gradient is too large for float16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 1e5 * 1e5 * 1e5


class _Handled(torch.Tensor):
    """A subclass with a handler of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class _Scale(nn.Module):
    """A module that stands for a number: functions of PyTorch take it as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(2.0 if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.inner(x), self)


def _freezes(self: Any, x: torch.Tensor) -> Any:
    self.inner.requires_grad_(False)
    return self.inner(x)


def _replaces_weight(self: Any, x: torch.Tensor) -> Any:
    self.inner.weight = nn.Parameter(self.inner.weight.detach().clone())
    return self.inner(x)


def _trains_itself(self: Any, x: torch.Tensor) -> Any:
    loss = self.inner(x).float().square().mean()
    loss.backward()
    return loss.detach()


def _evaluates(self: Any, x: torch.Tensor) -> Any:
    self.eval()
    return self.inner(x)


def _warns(self: Any, x: torch.Tensor) -> Any:
    warnings.warn("careful", stacklevel=2)
    return self.inner(x)


def _late_nan(self: Any, x: torch.Tensor) -> Any:
    return self.inner(x) * (NAN if x.shape[0] == 2 else 1.0)


def _late_overflow(self: Any, x: torch.Tensor) -> Any:
    return (self.inner(x) + 50) * (3e4 if x.shape[0] == 2 else 1.0)


FORWARDS = {
    "returns its own parameter": (lambda self, x: self.inner.weight, warns("coverage")),
    "returns its input": (lambda self, x: x, UNTRAINED),
    "returns a view of its input": (lambda self, x: x[:1].t(), UNTRAINED),
    "returns a constant": (lambda self, x: torch.ones(3), UNTRAINED),
    "returns a number beside a tensor": (lambda self, x: {"out": self.inner(x), "accuracy": 0.5}, PASSES),
    "returns one tensor 1,000 times": (lambda self, x: [self.inner(x)] * 1000, PASSES),
    "returns 1,000 views of one tensor": (lambda self, x: [y.view_as(y) for y in [self.inner(x)] * 1000], PASSES),
    "returns 1,000 views of its parameter": (
        lambda self, x: [self.inner(x), *(self.inner.weight.t() for _ in range(1000))], PASSES),
    "returns an alias whose backward overflows": (
        lambda self, x: [y := self.inner(x), _Alias.apply(y)], fails("nonfinite-gradient")),
    "returns a subclass with a handler": (lambda self, x: self.inner(x).as_subclass(_Handled), PASSES),
    "ignores its weights": (lambda self, x: x.matmul(x.t()), UNTRAINED),
    "uses one of two weights": (lambda self, x: x.matmul(self.inner.weight), PASSES),
    "freezes itself": (_freezes, UNTRAINED),
    "replaces its weight": (_replaces_weight, PASSES),
    "trains itself and returns the loss": (_trains_itself, PASSES),
    "switches itself to evaluation": (_evaluates, PASSES),
    "warns": (_warns, PASSES),
    "NaN in an unused output": (lambda self, x: (self.inner(x), x * NAN), fails("nonfinite-reference")),
    "NaN that is dropped": (lambda self, x: (self.inner(x).detach() / 0).nan_to_num(0, 0, 0) + self.inner(x), PASSES),
    "NaN that is dropped and spoils the gradient": (
        lambda self, x: (self.inner(x) / 0 * 0).nan_to_num() + self.inner(x), fails("nonfinite-reference")),
    "an output of infinities": (lambda self, x: self.inner(x).exp() * INF, fails("nonfinite-reference")),
    "an unused output overflows": (lambda self, x: (self.inner(x), (self.inner(x) + 50) * 3e4), fails("overflow")),
    "draws from Python": (lambda self, x: self.inner(x) * random.random(), PASSES),
    "reads a clock": (lambda self, x: self.inner(x) / next(TICKS), PASSES),  # float64 follows the one run
    "reads a clock and loses digits": (
        lambda self, x: (self.inner(x) + 1e4 - 1e4) * (1 + 1e-6 * next(TICKS)), fails("precision-loss")),
}  # fmt: skip
for title, (forward, report) in FORWARDS.items():
    add(f"odd forward: {title}", report, lambda f=forward: given(module(f)))


def _buffered() -> Any:
    odd = module(lambda self, x: self.kept[:2])
    odd.register_buffer("kept", torch.randn(4, 4))
    return given(odd)


def _counts() -> Any:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.count += 1
        return self.inner(x) / self.count

    odd = module(forward)
    odd.register_buffer("count", torch.zeros((), dtype=torch.long))
    return given(odd)


def _flat() -> Any:
    odd = module(lambda self, x: x.matmul(self.first) + x.matmul(self.second))
    flat = torch.randn(32)
    odd.first, odd.second = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4).t())
    return given(odd)


def _hooked_without_gradient() -> Any:
    odd = module(lambda self, x: self.inner(x).detach())
    odd.inner.weight.register_hook(lambda gradient: gradient * 2)
    return given(odd)


def _hooked(register: str, hook: Any) -> Any:
    odd = Base()
    getattr(odd.inner, register)(hook)
    return given(odd)


def _hook_of_nan() -> Any:
    odd = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    odd[1].register_full_backward_hook(lambda module, into, out: tuple(gradient * NAN for gradient in into))
    return given(odd)


def _with_weights(value: float) -> Any:
    odd = Base()
    nn.init.constant_(odd.inner.weight, value)
    return given(odd)


def _unused() -> Any:
    odd = module(lambda self, x: torch.tanh(x) @ x.t())
    odd.inner.bias = None
    return given(odd)


def _two_calls(forward: Any) -> Any:
    return module(forward), [(torch.randn(3, 4),), (torch.randn(2, 4),)]


class _Holder:
    def __init__(self) -> None:
        self.model = Base()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()


NORMED = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
MODELS = {
    "a view of a buffer": (_buffered, UNTRAINED),
    "a counter of calls": (_counts, PASSES),
    "parameters that are views": (_flat, PASSES),
    "a module with __torch_function__": (lambda: given(_Scale()), PASSES),
    "a hook on a parameter without a gradient": (_hooked_without_gradient, UNTRAINED),
    "a backward hook that returns nothing": (
        lambda: _hooked("register_full_backward_hook", lambda *args: None), PASSES),
    "a backward hook that makes NaN": (_hook_of_nan, fails("nonfinite-reference")),
    "an unused only parameter": (_unused, UNTRAINED),
    "weights that are NaN": (lambda: _with_weights(NAN), fails("nonfinite-reference")),
    "weights that are infinite": (lambda: _with_weights(INF), fails("nonfinite-reference")),
    "weights beyond float16": (lambda: _with_weights(1e6), fails("overflow")),
    "NaN inputs": (lambda: given(Base(), torch.full((3, 4), NAN)), fails("nonfinite-reference")),
    "NaN in the second of two calls": (lambda: _two_calls(_late_nan), fails("nonfinite-reference")),
    "overflow in the second of two calls": (lambda: _two_calls(_late_overflow), fails("overflow")),
    "batch norm of a batch of one": (
        lambda: given(NORMED, torch.randn(1, 4)), refused("raises in float32 too, in forward.*more than 1 value")),
    "batch norm of an empty batch": (lambda: given(NORMED, torch.randn(0, 4)), incomplete("precision-loss")),
    "batch norm of a batch of one in evaluation": (
        lambda: given(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(1, 4)), PASSES),
    "an instance with __call__": (lambda: given(_Holder()), PASSES),
    "a class method": (lambda: given(_Holder.of_class), PASSES),
    "a partial of a module": (lambda: given(functools.partial(Base())), PASSES),
    "no arguments at all": (lambda: (functools.partial(Base(), torch.randn(3, 4)), ()), PASSES),
}  # fmt: skip
for title, (make, report) in MODELS.items():
    add(f"odd model: {title}", report, make)

LOSSES = {
    "ignores the output": (lambda out: torch.ones((), requires_grad=True) * 2, UNTRAINED),
    "infinite with finite gradients": (lambda out: out.float().mean() + INF, fails("nonfinite-reference")),
    "infinite": (lambda out: out.float().mean() * INF, fails("nonfinite-reference")),
    "zero": (lambda out: out.float().mean() * 0, PASSES),
    "leaves grad mode off": (
        lambda out: (out.float().mean(), torch.set_grad_enabled(False))[0],
        fails("autocast-state", phrase="grad mode was True and is False")),
    "overflows in float16": (lambda out: ((out + 50) * 3e4).mean().float(), fails("overflow")),
}  # fmt: skip
for title, (loss, report) in LOSSES.items():
    add(f"odd loss: {title}", report, lambda f=loss: Subject(given(Base()), loss=f))


def _loop(after: Any) -> Any:
    model, data = Base(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        return after(number, loss.item())

    return {"model": model, "optimizer": optimizer, "step": step}


def _leaves_meta(number: int, loss: float) -> float:
    torch.set_default_device("meta")
    return loss


add("odd step: leaves the default device at meta", fails("autocast-state", phrase="meta"), lambda: _loop(_leaves_meta))
add("odd step: NaN from the second step", fails(), lambda: _loop(lambda number, loss: NAN if number else loss))
add("odd step: infinite loss", fails(), lambda: _loop(lambda number, loss: math.inf))
