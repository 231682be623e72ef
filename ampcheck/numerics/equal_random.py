"""Equal random numbers in every arm.

`randn(dtype=float64)` consumes the generator differently from `randn(dtype=bfloat16)`, so a model that draws noise
would see other noise in each precision. Inside `EqualRandom` every draw is made in float32 and then cast.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.formats import format_of
from ampcheck.torchtools.pytree import map_tensors, tensors

DRAWS = frozenset(
    "aten::" + name
    for name in [
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "normal",
        "normal_",
        "uniform",
        "uniform_",
        "bernoulli",
        "bernoulli_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "native_dropout",
    ]
)
"""Ops whose only floating result is a draw; those that draw inside (attention with dropout) keep their own streams."""

UNIFORM = frozenset(("aten::rand", "aten::rand_like", "aten::uniform_"))


class EqualRandom(TorchDispatchMode):
    """Make every draw in float32 and cast it; `drew` tells whether any op drew at all.

    rounded_to: give every draw, in whatever dtype, the value that it has in this one. A wide run inside it tells what
    the coarser numbers alone change.
    """

    supports_higher_order_operators = True

    def __init__(self, rounded_to: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False
        self._rounded_to = rounded_to

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.drew = self.drew or draws_numbers(func, args, kwargs)
        name, named = func._schema.name, _named(func, args, kwargs)
        if name not in DRAWS:
            return func(*args, **kwargs)
        if name.endswith("_"):
            target = args[0]
            if not target.is_floating_point():
                return func(*args, **kwargs)
            drawn = target.to(torch.float32, copy=True)
            func(drawn, *args[1:], **kwargs)
            return target.copy_(self._cast(drawn, target.dtype, name, named))
        wanted = kwargs.get("dtype") or next((t.dtype for _, t in tensors(args) if t.is_floating_point()), None)
        wanted = wanted or torch.get_default_dtype()
        if not wanted.is_floating_point:
            return func(*args, **kwargs)
        args, kwargs = map_tensors(lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
        if kwargs.get("dtype") is not None or not any(True for _ in tensors(args)):
            kwargs["dtype"] = torch.float32
        drawn = func(*args, **kwargs)
        return map_tensors(lambda t: self._cast(t, wanted, name, named) if t.is_floating_point() else t, drawn)

    def _cast(self, drawn: torch.Tensor, wanted: torch.dtype, name: str, named: dict[str, Any]) -> torch.Tensor:
        narrow = min(wanted, self._rounded_to or wanted, key=lambda dtype: dtype.itemsize)
        if narrow.itemsize <= 2 and name in UNIFORM:
            low, high = named.get("from", 0.0), named.get("to", 1.0)
            drawn = low + (high - low) * _on_grid((drawn - low) / (high - low or 1.0), narrow)
        return drawn.to(narrow).to(wanted)


def _on_grid(uniform: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uniform numbers as PyTorch draws them in `dtype`: multiples of 2^-p, zero among them and 1 never.

    p is the number of significant bits (`uniform_real` of ATen/core/TransformationHelper.h).
    """
    steps = float(format_of(dtype).largest_exact_integer)
    return (uniform * steps).floor() / steps


def draws_numbers(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call consumes random numbers: attention and dropout with probability 0 do not."""
    named = _named(func, args, kwargs)
    probability = named.get("dropout_p", named.get("p") if "dropout" in func._schema.name else None)
    return probability != 0.0 and named.get("train") is not False


def _named(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of a call by its name, defaults included."""
    arguments = func._schema.arguments
    named = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return named | {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs


@contextmanager
def seeded(device: str = "cpu", seed: int = 0) -> Iterator[Callable[[], bool]]:
    """Seed torch, numpy and random inside; the caller's streams go on afterwards as if nothing had been drawn.

    What it gives tells whether numpy's or Python's own stream was drawn from since. Only the streams of the CPU and of
    `device` are touched: to ask for more would initialise devices that nobody uses.
    """
    python, array = random.getstate(), numpy.random.get_state()
    place = torch.device(device)
    others = [] if place.type == "cpu" else [place.index or 0]
    with torch.random.fork_rng(devices=others, device_type=place.type if others else "cuda"):
        torch.default_generator.manual_seed(seed)
        if others:
            getattr(torch, place.type).manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        fresh = random.getstate(), str(numpy.random.get_state())
        try:
            yield lambda: (random.getstate(), str(numpy.random.get_state())) != fresh
        finally:
            random.setstate(python)
            numpy.random.set_state(array)
