"""Gradient ascent inside a declared domain, and minimising what it finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ampcheck.core.errors import as_result
from ampcheck.parity.example import Example
from ampcheck.search.runner import Runner
from ampcheck.torchtools.pytree import tensors

_ROUNDS = 16
_SHOWN = 4
_CALLS = 300


class _Largest(TorchFunctionMode):
    """The largest finite value that any torch function returns inside, with its history."""

    def __init__(self) -> None:
        super().__init__()
        self.value: torch.Tensor | None = None
        self.size = -math.inf

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for _, tensor in tensors(out):
            if tensor.requires_grad and tensor.is_floating_point() and tensor.numel():
                magnitude = tensor.abs()
                top = torch.where(magnitude.isfinite(), magnitude, 0.0).amax()
                if float(top.detach()) > self.size:
                    self.size, self.value = float(top.detach()), top
        return out


def climb(
    runner: Runner, example: Example, domains: Mapping[str, tuple[float, float]], spent: Callable[[], bool]
) -> Iterator[Example]:
    """Examples on the way up: floating inputs follow the sign of the gradient of the largest value that occurs.

    domains: (low, high) of each floating tensor by its path; what its dtype cannot hold of that is left out. Steps
    start at a quarter of the domain and halve when a step gains nothing. A model without a gradient, or that does not
    run in float64, is left where it is. spent: whether the time is over.
    """
    domains = {path: _within(t.dtype, *domains[path]) for path, t in example.floats().items()}
    share, best = 0.25, -math.inf
    here = example.replaced({path: t.detach().clamp(*domains[path]) for path, t in example.floats().items()})
    for number in range(_ROUNDS):
        if spent():
            return
        size, gradients = _gradients(runner, here)
        if not gradients:
            return
        if size <= best:
            share /= 2
        best = max(best, size)
        own = here.floats()
        moved = {}
        for path, gradient in gradients.items():
            low, high = domains[path]
            step = share * (high - low) * gradient.nan_to_num(0.0).sign()
            moved[path] = (own[path].double() + step).clamp(low, high).to(own[path].dtype)
        here = here.replaced(moved)
        if number % _SHOWN == _SHOWN - 1:
            yield here


def _gradients(runner: Runner, example: Example) -> tuple[float, dict[str, torch.Tensor]]:
    """The largest value inside in float64, and its gradients by the path of the input."""
    wide = example.widened(runner.device)
    inputs = {path: tensor.requires_grad_() for path, tensor in wide.floats().items()}
    # A leaf cannot be written in place; a view of it can.
    call = wide.replaced({path: tensor.view_as(tensor) for path, tensor in inputs.items()})
    largest = _Largest()
    try:
        with runner.differentiable() as model, largest:
            model(*call.args, **call.kwargs)
        if largest.value is None:
            return 0.0, {}
        gradients = torch.autograd.grad(largest.value, list(inputs.values()), allow_unused=True)
    except BaseException as error:  # noqa: BLE001  # the user's model, asked for a gradient that it may refuse
        as_result(error)
        return 0.0, {}
    return largest.size, {path: g for path, g in zip(inputs, gradients, strict=True) if g is not None}


def _within(dtype: torch.dtype, low: float, high: float) -> tuple[float, float]:
    """The bounds, each moved to the nearest finite value of the dtype's range."""
    least, most = torch.finfo(dtype).min, torch.finfo(dtype).max
    return min(max(low, least), most), min(max(high, least), most)


def minimise(example: Example, fails: Callable[[Example], bool]) -> None:
    """Try examples with more zeros and powers of two, in a few hundred calls; each starts from the last that failed.

    Hypothesis minimises what it drew; ascent leaves that.
    """
    calls = 0
    for path, tensor in example.floats().items():
        flat = tensor.detach().reshape(-1).clone()
        for first, size, value in _simpler(flat):
            trial = flat.clone()
            trial[first : first + size] = value
            candidate = example.replaced({path: trial.reshape(tensor.shape)})
            if torch.equal(trial, flat) or calls >= _CALLS:
                continue
            calls += 1
            if fails(candidate):
                flat[first : first + size] = value
        example = example.replaced({path: flat.reshape(tensor.shape)})


def _simpler(flat: torch.Tensor) -> Iterator[tuple[int, int, float]]:
    """Parts to make zero, the largest first, then elements to make shorter numbers. Reads `flat` as it changes."""
    size = flat.numel()
    while size:
        yield from ((first, size, 0.0) for first in range(0, flat.numel(), size))
        size //= 2
    for index in flat.nonzero().reshape(-1).tolist():
        value = float(flat[index])
        yield index, 1, math.copysign(2.0 ** math.floor(math.log2(abs(value))), value)
        yield index, 1, round(float(flat[index]))
