"""Gradient ascent inside a declared domain, and making smaller what it finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ampcheck.core.errors import as_result
from ampcheck.search.arms import Arms, Example
from ampcheck.torchtools.pytree import tensors

_ROUNDS = 16
_SHOWN = 4
_CALLS = 300


class _Largest(TorchFunctionMode):
    """The largest finite value that any torch function gives inside, with its history."""

    def __init__(self) -> None:
        super().__init__()
        self.value: torch.Tensor | None = None
        self._size = -math.inf

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for _, tensor in tensors(out):
            if tensor.requires_grad and tensor.is_floating_point() and tensor.numel():
                magnitude = tensor.abs()
                top = torch.where(magnitude.isfinite(), magnitude, 0.0).amax()
                if float(top.detach()) > self._size:
                    self._size, self.value = float(top.detach()), top
        return out


def climb(
    arms: Arms, example: Example, domains: Mapping[str, tuple[float, float]], spent: Callable[[], bool]
) -> Iterator[Example]:
    """Examples on the way up: every floating input follows the sign of the gradient of the largest value that occurs.

    domains: (low, high) of each floating tensor by its path; what its dtype cannot hold of that is left out. Steps
    start at a quarter of the rest and halve when a step gains nothing; inputs stay inside and representable in their
    own dtype. A model without a gradient is left where it is. spent: whether the time is over.
    """
    domains = {name: _within(t.dtype, *domains[name]) for name, t in example.floats().items()}
    share, best = 0.25, -math.inf
    here = example.replaced({name: t.detach().clamp(*domains[name]) for name, t in example.floats().items()})
    for number in range(_ROUNDS):
        if spent():
            return
        largest = _Largest()
        try:
            with largest:
                _, leaves, _ = arms.differentiable(here)
            value = largest.value
            held = list(leaves.values())
            grads = torch.autograd.grad(value, held, allow_unused=True) if value is not None and held else ()
        except BaseException as error:  # noqa: BLE001  # the user's model, asked for a gradient that it may refuse
            as_result(error)
            return
        if value is None:
            return
        if float(value.detach()) <= best:
            share /= 2
        best = max(best, float(value.detach()))
        moves = {name: grad for (name, _), grad in zip(leaves.items(), grads, strict=True) if grad is not None}
        own = here.floats()
        changed = {
            name: (own[name].double() + share * (domains[name][1] - domains[name][0]) * grad.nan_to_num(0.0).sign())
            .clamp(*domains[name])
            .to(own[name].dtype)
            for name, grad in moves.items()
        }
        if not changed:
            return
        here = here.replaced(changed)
        if number % _SHOWN == _SHOWN - 1:
            yield here


def _within(dtype: torch.dtype, low: float, high: float) -> tuple[float, float]:
    """The bounds, each moved to the nearest finite value of the dtype's range."""
    least, most = torch.finfo(dtype).min, torch.finfo(dtype).max
    return min(max(low, least), most), min(max(high, least), most)


def smaller(example: Example, fails: Callable[[Example], bool]) -> Example:
    """An example that fails still, with as many zeros and as short numbers as a few hundred calls find."""
    calls = 0

    def kept(candidate: Example) -> bool:
        nonlocal calls
        calls += 1
        return calls <= _CALLS and fails(candidate)

    for name in example.floats():
        flat = example.floats()[name].detach().reshape(-1).clone()
        size = flat.numel()
        while size:
            for first in range(0, flat.numel(), size):
                trial = flat.clone()
                trial[first : first + size] = 0
                if not torch.equal(trial, flat) and kept(candidate := _with(example, name, trial)):
                    example, flat = candidate, trial
            size //= 2
        for index in flat.nonzero().reshape(-1).tolist():
            value = float(flat[index])
            for shorter in (round(value), math.copysign(2.0 ** math.floor(math.log2(abs(value))), value)):
                trial = flat.clone()
                trial[index] = shorter
                if shorter and not torch.equal(trial, flat) and kept(candidate := _with(example, name, trial)):
                    example, flat = candidate, trial
                    break
    return example


def _with(example: Example, name: str, flat: torch.Tensor) -> Example:
    return example.replaced({name: flat.reshape(example.floats()[name].shape)})
