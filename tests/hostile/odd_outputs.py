"""Outputs that hold values where nobody looks at first, wrappers without memory, and numbers that leave without an op.

Each defect overflows float16 on its way out; each healthy twin does not.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from odd_rows import PASSES, add, fails, given, incomplete, module, warns
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map


class Slots:
    __slots__ = ("y",)

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


class Callback:
    """An object that is called later."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y

    def __call__(self) -> torch.Tensor:
        return self.y


class Wrapper(torch.Tensor):
    """A minimal wrapper: no memory, and no words for the compiler."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda t: t.inner if isinstance(t, Wrapper) else t, (args, kwargs or {}))
        return tree_map(lambda t: Wrapper(t) if isinstance(t, torch.Tensor) else t, func(*plain[0], **plain[1]))


def enclosed(y: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: y


def jagged(y: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([y[:1], y[1:]], layout=torch.jagged)


def made(y: torch.Tensor, scale: float) -> torch.Tensor:
    """Beyond float16 for a scale of 1,000."""
    return (y + 1) * scale * scale


HELD: dict[str, Callable[[torch.Tensor], Any]] = {
    "slots": Slots,
    "slots in a list": lambda y: [Slots(y)],
    "a closure": enclosed,
    "a partial": lambda y: functools.partial(torch.add, y),
    "a method of a tensor": lambda y: y.sum,
    "a callable object": Callback,
    "a set": lambda y: {y},
    "a frozen set in a dict": lambda y: {"out": frozenset([y])},
    "a sparse tensor": lambda y: y.to_sparse(),
    "a sparse CSR tensor": lambda y: y.detach().float().to_sparse_csr(),
    "a nested tensor": lambda y: torch.nested.as_nested_tensor([y[:1], y[1:]]),
    "a jagged tensor": jagged,
    "a masked tensor": lambda y: masked_tensor(y.float(), y == y),
    "a wrapper": Wrapper,
    "a wrapper of two": lambda y: TwoTensor(y, y),
    "a list of wrappers": lambda y: [y, Wrapper(y.detach())],
}
LEFT: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda y: torch.tensor(y.tolist()),
    "list": lambda y: torch.tensor([float(v) for v in list(y.flatten())]),
    "numpy": lambda y: torch.tensor(y.detach().numpy().tolist()),
    "bytes": lambda y: torch.frombuffer(bytearray(y.detach().numpy().tobytes()), dtype=y.dtype).float().nan_to_num(),
    "an array": lambda y: torch.tensor(y.detach().numpy().sum().item()),
    "pickle": lambda y: pickle.loads(pickle.dumps(y.detach())).isfinite().float(),
}


def _module(give: Callable[[torch.Tensor], Any], scale: float) -> Any:
    return lambda: given(module(lambda self, x: give(made(self.inner(x), scale))))


for name, give in HELD.items():
    add(f"an overflow is held by {name}", fails("overflow", phrase="it reaches .*the output"), _module(give, 1e3))
for name in ("slots", "a set", "slots in a list", "a frozen set in a dict"):
    add(f"sound values are held by {name}", PASSES, _module(HELD[name], 1.0))
for name in ("a closure", "a sparse tensor", "a jagged tensor", "a masked tensor", "a wrapper", "a wrapper of two"):
    add(f"sound values are held by {name}", incomplete("nonfinite-gradient"), _module(HELD[name], 1.0))
for name, give in LEFT.items():
    phrase = "it reaches a number that left the run"
    add(f"an overflow leaves by {name}", fails("overflow", phrase=phrase), _module(give, 1e3))
    add(f"sound values leave by {name}", incomplete("nonfinite-gradient"), _module(give, 1.0))

add(
    "two alike in a set, which is not looked into",
    warns("overflow", phrase="whether it is in outputs inside a set was not looked at"),
    lambda: given(module(lambda self, x: {made(self.inner(x), 1e3), made(self.inner(x), 1e3)})),
)
add(
    "nothing is left where all outputs were looked at",
    warns("overflow", phrase="nothing of it is left in outputs or gradients"),
    lambda: given(module(lambda self, x: made(self.inner(x).detach(), 1e3).isfinite().float() + self.inner(x))),
)


def _wrapped_input(scale: float) -> Any:
    return lambda: (module(lambda self, x: made(self.inner(x), scale)), (Wrapper(torch.randn(3, 4)),))


add("takes a wrapper", incomplete("nonfinite-gradient"), _wrapped_input(1.0))
add("takes a wrapper and overflows", fails("overflow"), _wrapped_input(1e3))


@torch.jit.script
def _twice(x):  # type: ignore[no-untyped-def]
    return x * 2.0


@torch.jit.script
def _forked(x):  # type: ignore[no-untyped-def]
    return torch.jit.wait(torch.jit.fork(_twice, x))


def _fake(self: Any, x: torch.Tensor) -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return self.inner(x)


add(
    "forks in TorchScript",
    PASSES,
    lambda: given(module(lambda self, x: _forked(self.inner(x)))),
)
add("computes with fake tensors", incomplete("coverage", phrase="fake or on meta"), lambda: given(module(_fake)))
add(
    "makes a wrapper that nothing returns",
    PASSES,
    lambda: given(module(lambda self, x: self.inner(x) + Wrapper(torch.ones(4)).inner)),
)
