"""Equal random numbers in every arm.

`randn(dtype=float64)` consumes the generator differently from `randn(dtype=bfloat16)`, so a model that draws noise
would see other noise in each precision. Inside `EqualRandom` every draw is made in float32 and then cast.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.nest import map_tensors, tensors

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


class EqualRandom(TorchDispatchMode):
    """Make every draw in float32 and cast it; `drew` tells whether any op drew at all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.drew = self.drew or draws_numbers(func, args, kwargs)
        name = func._schema.name
        if name not in DRAWS:
            return func(*args, **kwargs)
        if name.endswith("_"):
            target = args[0]
            if not target.is_floating_point() or target.dtype is torch.float32:
                return func(*args, **kwargs)
            drawn = target.to(torch.float32)
            func(drawn, *args[1:], **kwargs)
            if name == "aten::uniform_":
                named = _named(func, args, kwargs)
                drawn = _below(drawn, named["from"], named["to"], target.dtype)
            return target.copy_(drawn)
        wanted = kwargs.get("dtype") or next((t.dtype for _, t in tensors(args) if t.is_floating_point()), None)
        wanted = wanted or torch.get_default_dtype()
        if wanted is torch.float32 or not wanted.is_floating_point:
            return func(*args, **kwargs)
        args, kwargs = map_tensors(lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
        if kwargs.get("dtype") is not None or not any(True for _ in tensors(args)):
            kwargs["dtype"] = torch.float32
        drawn = func(*args, **kwargs)
        if name in ("aten::rand", "aten::rand_like"):
            return _below(drawn, 0.0, 1.0, wanted)
        return map_tensors(lambda t: t.to(wanted) if t.is_floating_point() else t, drawn)


def _below(drawn: torch.Tensor, low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
    """Uniform numbers of [low, high) in `dtype`: what the cast rounds up to `high`, PyTorch never draws.

    The cast keeps the numbers of the arms within a rounding of each other. PyTorch itself draws 16-bit numbers on a
    coarser grid, on which exact zeros are more frequent.
    """
    cast = drawn.to(dtype)
    return torch.where(cast >= high, torch.nextafter(torch.full_like(cast, high), torch.full_like(cast, low)), cast)


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
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed torch, numpy and random inside; the caller's streams go on afterwards as if nothing had been drawn."""
    python, array = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(array)
