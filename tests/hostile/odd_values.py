"""Outputs, inputs and weights of every odd type."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from odd_rows import PASSES, Base, add, given, incomplete, module, refused, warns
from torch import nn


@dataclass(frozen=True, slots=True)
class Slotted:
    out: torch.Tensor
    note: str = "ok"


Pair = namedtuple("Pair", "first second")


class Sub(torch.Tensor):
    """A subclass without any code of its own."""


class Lazy(UserDict):
    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)


async def _later(x: torch.Tensor) -> torch.Tensor:
    return x


def _generated(x: torch.Tensor) -> Any:
    yield x


async def _async_generated(x: torch.Tensor) -> Any:
    yield x


class Awaitable:
    def __await__(self) -> Any:
        yield


WITHOUT_TENSORS = {
    "None": lambda y: None,
    "text": lambda y: "text",
    "int": lambda y: 3,
    "float": lambda y: 0.5,
    "bool": lambda y: True,
    "an empty dict": lambda y: {},
    "an empty tuple": lambda y: (),
    "a class": lambda y: int,
    "a numpy array": lambda y: y.detach().float().numpy(),
    "the module itself": lambda y: nn.Linear(1, 1),
    "NotImplemented": lambda y: NotImplemented,
    "an item of itself": lambda y: float(y.detach().sum()),
}
ODD_TENSORS = {
    "an empty tensor": lambda y: y[:0],
    "integers": lambda y: y.argmax(-1),
    "booleans": lambda y: y > 0,
    "a quantized tensor": lambda y: torch.quantize_per_tensor(y.detach().float(), 0.1, 0, torch.quint8),
}
VALUES_INSIDE = {
    "a sparse tensor": lambda y: y.float().to_sparse(),
    "a sparse CSR tensor": lambda y: y.detach().float().to_sparse_csr(),
    "a nested tensor": lambda y: torch.nested.as_nested_tensor([y[0], y[1]]),
    "a jagged tensor": lambda y: torch.nested.as_nested_tensor([y[:1], y[:2]], layout=torch.jagged),
}
UNCOMPARED = {
    "a meta tensor": (lambda y: y.to("meta"), "fake or on meta"),
    "float8": (lambda y: y.detach().float().to(torch.float8_e4m3fn), "sparse, nested, wrapped, float8 or on meta"),
}
TENSORS = {
    "complex numbers": lambda y: torch.view_as_complex(y.float().reshape(-1, 2)),
    "a conjugate": lambda y: torch.view_as_complex(y.float().reshape(-1, 2)).conj(),
    "a subclass": lambda y: y.as_subclass(Sub),
    "a dict": lambda y: {"out": y, "n": 1, None: y},
    "a dict of dicts": lambda y: {1: {2: [y, (y, None)]}},
    "an OrderedDict": lambda y: OrderedDict(out=y),
    "a mapping proxy": lambda y: MappingProxyType({"out": y}),
    "a dataclass with slots": lambda y: Slotted(y),
    "a namedtuple": lambda y: Pair(y, None),
    "a tensor in a set": lambda y: {y},
    "a deque": lambda y: deque([y, {"again": y}]),
    "a namespace": lambda y: SimpleNamespace(out=y),
    "a max with indices": lambda y: y.max(-1),
    "a view": lambda y: y.t(),
    "an expanded tensor": lambda y: y[:1].expand(5, 4),
    "one tensor twice": lambda y: (y, y),
    "a list that holds itself": lambda y: _knot(y),
    "30 tensors": lambda y: [y * 1 for _ in range(30)],
    "float64": lambda y: y.double(),
}
NOTHING_RAN = {
    "a generator": (_generated, "returned a generator"),
    "a coroutine": (_later, "returned a coroutine"),
    "an async generator": (_async_generated, "returned an async generator"),
    "an awaitable": (lambda y: Awaitable(), "returned an awaitable"),
    "a generator expression": (lambda y: (row for row in y), "returned a generator"),
    "a lazy map": (lambda y: map(torch.relu, [y]), "returned a lazy iterator"),
}


def _knot(y: torch.Tensor) -> list[Any]:
    knot: list[Any] = [y]
    knot.append(knot)
    return knot


def _returning(how: Any) -> Any:
    return lambda: given(module(lambda self, x: how(self.inner(x))))


for title, how in WITHOUT_TENSORS.items():
    add(f"returns {title}", incomplete("precision-loss", "nonfinite-gradient"), _returning(how))
for title, how in ODD_TENSORS.items():
    add(f"returns {title}", incomplete("precision-loss"), _returning(how))
for title, how in VALUES_INSIDE.items():
    add(f"returns {title}", incomplete("nonfinite-gradient"), _returning(how))
for title, (how, phrase) in UNCOMPARED.items():
    add(f"returns {title}", incomplete("precision-loss", "nonfinite-gradient", phrase=phrase), _returning(how))
add("returns a 0-d tensor", warns("loss-dtype"), _returning(lambda y: y.sum()))
add("returns a new parameter", incomplete("nonfinite-gradient"), _returning(lambda y: nn.Parameter(y.detach().clone())))
add("returns a detached tensor", incomplete("nonfinite-gradient"), _returning(lambda y: y.detach()))
for title, how in TENSORS.items():
    add(f"returns {title}", PASSES, _returning(how))
add("returns a mapping that refuses to be read", refused("KeyError"), _returning(lambda y: Lazy(out=y)))
for title, (how, phrase) in NOTHING_RAN.items():
    add(f"returns {title}", refused(phrase), _returning(how))

add("forward is a generator function", refused("returned a generator"), lambda: given(module(_forward_yields)))
add("forward is a coroutine function", refused("returned a coroutine"), lambda: given(module(_forward_async)))
add("a function model that is async", refused("returned a coroutine"), lambda: (_later, (torch.ones(2),)))


def _forward_yields(self: Any, x: torch.Tensor) -> Any:
    yield self.inner(x)


async def _forward_async(self: Any, x: torch.Tensor) -> Any:
    await asyncio.sleep(0)
    return self.inner(x)


# Inputs


def _overlapping() -> torch.Tensor:
    return torch.randn(6).as_strided((3, 4), (1, 1))


INPUTS = {
    "that require a gradient": lambda: (torch.randn(3, 4, requires_grad=True),),
    "with a history": lambda: (torch.randn(3, 4, requires_grad=True) * 2,),
    "that overlap": lambda: (_overlapping(),),
    "that are expanded": lambda: (torch.randn(1, 4).expand(3, 4),),
    "without elements": lambda: (torch.randn(0, 4),),
    "that are a transposed view": lambda: (torch.randn(4, 3).t(),),
    "that are a parameter": lambda: (nn.Parameter(torch.randn(3, 4)),),
    "in inference mode": lambda: (_inference(),),
    "as keywords": lambda: {"x": torch.randn(3, 4)},
    "that are negative views": lambda: (torch._neg_view(torch.randn(3, 4)),),
    "that are pinned to zero": lambda: (torch.zeros(3, 4),),
}
WRONG_INPUTS = {
    "of a subclass that cannot be copied": (lambda: (torch.randn(3, 4).as_subclass(Sub),), "must be copied"),
    "too few": (lambda: (), "missing 1 required positional argument"),
    "too many": (lambda: (torch.ones(3, 4), torch.ones(1)), "takes 2 positional arguments"),
    "of another size": (lambda: (torch.ones(3, 5),), "shapes cannot be multiplied"),
    "of numpy": (lambda: (np.ones((3, 4), dtype=np.float32),), "ndarray|numpy"),
    "with an unknown keyword": (lambda: {"y": torch.ones(3, 4)}, "unexpected keyword argument"),
    "that are None": (lambda: (None,), "NoneType"),
    "on meta": (lambda: (torch.ones(3, 4, device="meta"),), "meta"),
    "of integers": (lambda: (torch.ones(3, 4, dtype=torch.long),), "dtype"),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3, 4)


for title, make in INPUTS.items():
    add(
        f"inputs {title}",
        incomplete("precision-loss") if title == "without elements" else PASSES,
        lambda m=make: (Base(), m()),
    )
for title, (make, phrase) in WRONG_INPUTS.items():
    add(f"inputs {title}", refused(phrase), lambda m=make: (Base(), m()))
add("inputs are numpy arrays that forward takes", PASSES, lambda: (
    module(lambda self, x: self.inner(torch.from_numpy(x))), (np.ones((3, 4), dtype=np.float32),)
))  # fmt: skip


# Weights


def _tied() -> Any:
    odd = module(lambda self, x: self.out(self.inner(x)))
    odd.out = nn.Linear(4, 4)
    odd.out.weight = odd.inner.weight
    return odd


def _none_buffer() -> Any:
    odd = Base()
    odd.register_buffer("nothing", None)
    odd.register_parameter("bias", None)
    return odd


def _shared_module() -> Any:
    odd = module(lambda self, x: self.again(self.inner(x)))
    odd.again = odd.inner
    return odd


def _parametrized() -> Any:
    odd = Base()
    nn.utils.parametrize.register_parametrization(odd.inner, "weight", nn.Identity())
    return odd


def _frozen() -> Any:
    odd = Base()
    odd.requires_grad_(False)
    return odd


def _half_frozen() -> Any:
    odd = Base()
    odd.inner.weight.requires_grad_(False)
    return odd


def _cyclic() -> Any:
    odd = Base()
    odd.__dict__["me"] = odd
    odd.inner.__dict__["parent"] = odd
    return odd


def _named(name: str) -> Any:
    odd = module(lambda self, x: self._modules[name](x))
    odd.add_module(name, nn.Linear(4, 4))
    return odd


WEIGHTS = {
    "no parameters": lambda: nn.ReLU(),
    "frozen parameters": _frozen,
    "one frozen parameter": _half_frozen,
    "lazy parameters": lambda: nn.LazyLinear(4),
    "tied weights": _tied,
    "a shared module": _shared_module,
    "None in place of a buffer": _none_buffer,
    "a parametrization": _parametrized,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "the old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "a parameter of shape ()": lambda: _scalar_parameter(),
    "a parameter without elements": lambda: _empty_parameter(),
    "references to itself": _cyclic,
    "a module named forward_": lambda: _named("forward_"),
    "a module named with a space": lambda: _named("a b"),
    "a module named in Chinese": lambda: _named("层"),
    "a module named like markup": lambda: _named("[red]x[/]"),
}


def _scalar_parameter() -> Any:
    odd = module(lambda self, x: self.inner(x) * self.scale)
    odd.scale = nn.Parameter(torch.tensor(2.0))
    return odd


def _empty_parameter() -> Any:
    odd = Base()
    odd.empty = nn.Parameter(torch.empty(0, 4))
    return odd


for title, make in WEIGHTS.items():
    add(f"a model with {title}", warns("coverage") if title == "no parameters" else PASSES, lambda m=make: given(m()))
add("a model with lazy batch norm", refused("must be copied.*uninitialized"), lambda: given(nn.LazyBatchNorm1d()))
