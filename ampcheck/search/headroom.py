"""How near the values inside a run come to the end of their formats, and where one went beyond."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.core.run import Where
from ampcheck.numerics.ops import UNWRITTEN, OpWatch
from ampcheck.search.arms import Arms, Example
from ampcheck.search.stats import Peak
from ampcheck.strategies import as_code
from ampcheck.torchtools.pytree import tensors
from ampcheck.torchtools.trace import OpEvent, Trace


class Headroom:
    """The largest share of its own format that any op's result took over all examples, and the ops that overflowed."""

    def __init__(self, arms: Arms) -> None:
        self.peak: tuple[float, Example | None] = (0.0, None)
        self.overflow: Peak | None = None
        self._arms = arms
        self._looks = 0

    def look(self, example: Example) -> float:
        """Run the example in low precision, and give the largest share of its format that a value inside takes."""
        mode = _Shares()
        if self._arms.low(example, mode).error is not None:
            return 0.0
        if mode.share > self.peak[0]:
            self.peak = mode.share, example
        if mode.made and self.overflow is None and self._looks < _LOOKS:
            self._looks += 1
            self.overflow = self._overflowed(example)
        return mode.share

    def largest(self) -> Peak:
        """The value with the least room above it, its op and its example."""
        example = self.peak[1]
        if example is None:
            return Peak()
        seen = _Places()
        self._arms.low(example, Trace(self._arms.root, observers=(seen,)))
        return Peak(seen.magnitude, seen.where, as_code(plain(example)), seen.format)

    def _overflowed(self, example: Example) -> Peak | None:
        """The op that made something infinite of finite values where float64 does not, if there is one."""
        watch = OpWatch()
        self._arms.low(example, Trace(self._arms.root, observers=(watch,)))
        for fact in watch.facts():
            if fact.produced and fact.limited is True:
                return Peak(math.inf, fact.where, as_code(plain(example)), fact.dtype)
        return None


_LOOKS = 16
"""Examples with an infinity inside that are looked at once more, op by op: many models divide by zero on purpose."""


def plain(example: Example) -> Any:
    """The example as a strategy gives it: a lone tensor by itself."""
    if example.kwargs:
        return example.args, dict(example.kwargs)
    return example.args[0] if len(example.args) == 1 else example.args


class _Shares(TorchDispatchMode):
    """The largest finite result of any op over the maximum of its dtype; whether one is infinite of finite inputs."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.share = 0.0
        self.made = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return out
        for tensor, top in _tops(func, args, kwargs, out):
            self.share = max(self.share, top / torch.finfo(tensor.dtype).max)
            if not self.made and tensor.dtype.itemsize == 2 and not bool(tensor.detach().isfinite().all()):
                given = [t for _, t in tensors((args, kwargs)) if t.is_floating_point()]
                self.made = all(bool(t.detach().isfinite().all()) for t in given)
        return out


class _Places:
    """An observer of `ampcheck.torchtools.trace.Trace`: the op whose result takes the largest share of its format."""

    def __init__(self) -> None:
        self.magnitude, self.where, self.format = 0.0, Where(), ""
        self._share = 0.0

    def before(self, op: object, args: object, kwargs: object) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: object, args: object, kwargs: object, out: object, held: object) -> None:
        """Note the result if it is the nearest to the end of its format so far."""
        for tensor, top in _tops(op, args, kwargs, out):
            share = top / torch.finfo(tensor.dtype).max
            if share > self._share:
                self._share, self.magnitude, self.where = share, top, event.where
                self.format = str(tensor.dtype).removeprefix("torch.")


def _tops(op: Any, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[torch.Tensor, float]]:
    """Floating results with their largest finite magnitude.

    Left out: views, memory that nothing was written to, constants made by the op itself, and elements that equal a
    number among the arguments, or the maximum of their dtype where an argument holds that already, which is a fill (a
    mask's lowest value, or what is added to it) or a bound and says nothing about the data.
    """
    if op.is_view or op._schema.name.startswith(UNWRITTEN):
        return
    given = [tensor for _, tensor in tensors((args, kwargs))]
    if not given:
        return
    numbers = [abs(float(v)) for v in (*args, *kwargs.values()) if isinstance(v, float) and math.isfinite(v)]
    numbers += [abs(float(t)) for t in given if t.dim() == 0 and t.is_floating_point() and t.numel()]
    for _, tensor in tensors(out):
        wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1  # float8 has no comparisons
        if wide and tensor.numel() and tensor.layout is torch.strided:
            size = tensor.detach().abs()
            size = torch.where(size.isfinite(), size, 0.0)
            top, most = float(size.amax()), torch.finfo(size.dtype).max
            if top == most and any(bool((t.detach().abs() == most).any()) for t in given if t.is_floating_point()):
                numbers.append(most)
            if any(_equal(top, number, tensor.dtype) for number in numbers):
                for number in numbers:
                    size = torch.where(size == torch.tensor(number, dtype=size.dtype), 0.0, size)
                top = float(size.amax())
            yield tensor, top


def _equal(top: float, number: float, dtype: torch.dtype) -> bool:
    return top == float(torch.tensor(number, dtype=dtype))
