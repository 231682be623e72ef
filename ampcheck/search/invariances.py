"""Invariances that a user declares: other inputs that must give the same result, or one that is known from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ampcheck.errors import UsageError
from ampcheck.nest import map_tensors
from ampcheck.search.arms import Example


class Invariance(Protocol):
    """What `assert_amp_property(invariances=...)` takes: `undone(f(changed(x))) == f(x)`."""

    @property
    def name(self) -> str:
        """What findings call it."""

    def changed(self, example: Example) -> Example:
        """The other inputs."""

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """An output at the other inputs as it is to be at the first."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Reversing the samples along `dim` of every input reverses them in every output."""

    dim: int = 0

    @property
    def name(self) -> str:
        """What findings call it."""
        return f"batch order along dimension {self.dim}"

    def changed(self, example: Example) -> Example:
        """Every tensor that has the dimension, reversed."""
        return example.mapped(self.undone)

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Reversed again."""
        return output.flip(self.dim) if -output.dim() <= self.dim < output.dim() else output


@dataclass(frozen=True, slots=True)
class Scale:
    """Inputs times `factor` give the result times `factor ** degree`: 0 for a norm layer, 1 for a homogeneous one."""

    factor: float = 2.0
    degree: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no factor."""
        if not (math.isfinite(self.factor) and self.factor != 0 and math.isfinite(self.degree)):
            raise UsageError(f"Scale needs a finite factor other than 0 and a finite degree; found {self!r}")

    @property
    def name(self) -> str:
        """What findings call it."""
        return f"scale by {self.factor:g}"

    def changed(self, example: Example) -> Example:
        """Floating inputs times the factor."""
        return example.mapped(lambda t: t * self.factor if t.is_floating_point() else t)

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs over the power of the factor."""
        return output / self.factor**self.degree if output.is_floating_point() else output


@dataclass(frozen=True, slots=True)
class Shift:
    """Adding `amount` to the inputs changes nothing (softmax, variance), or moves the result by `result` (mean)."""

    amount: float = 1.0
    result: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no amount."""
        if not (math.isfinite(self.amount) and math.isfinite(self.result)):
            raise UsageError(f"Shift needs a finite amount and result; found {self!r}")

    @property
    def name(self) -> str:
        """What findings call it."""
        return f"shift by {self.amount:g}"

    def changed(self, example: Example) -> Example:
        """Floating inputs plus the amount."""
        return example.mapped(lambda t: t + self.amount if t.is_floating_point() else t)

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs less what they move by."""
        return output - self.result if output.is_floating_point() else output


@dataclass(frozen=True, slots=True)
class Padding:
    """`count` elements of `value` behind the inputs along `dim` leave the other outputs as they are."""

    dim: int = -1
    count: int = 1
    value: float = 0.0

    def __post_init__(self) -> None:
        """Refuse padding by nothing."""
        if self.count < 1:
            raise UsageError(f"Padding needs a count of at least 1; found {self.count}")

    @property
    def name(self) -> str:
        """What findings call it."""
        return f"padding along dimension {self.dim}"

    def changed(self, example: Example) -> Example:
        """Every tensor that has the dimension, longer."""

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            if not -tensor.dim() <= self.dim < tensor.dim():
                return tensor
            sides = list(tensor.shape)
            sides[self.dim] = self.count
            return torch.cat([tensor, tensor.new_full(sides, self.value)], self.dim)

        return example.mapped(padded)

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs without what was added; an output without the dimension as it is."""
        if not -output.dim() <= self.dim < output.dim():
            return output
        return output.narrow(self.dim, 0, max(0, output.shape[self.dim] - self.count))


@dataclass(frozen=True, slots=True)
class Declared:
    """An invariance of the user's own: `change(*args, **kwargs) -> (args, kwargs)`, and `undo(output) -> output`."""

    name: str
    change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    undo: Callable[[torch.Tensor], torch.Tensor] = lambda output: output

    def changed(self, example: Example) -> Example:
        """What `change` makes of copies of the arguments."""
        copied = map_tensors(torch.clone, (example.args, dict(example.kwargs)))
        found = self.change(*copied[0], **copied[1])
        pair = isinstance(found, tuple) and len(found) == 2
        if not (pair and isinstance(found[0], (tuple, list)) and isinstance(found[1], dict)):
            raise UsageError(f"change of {self.name!r} must return (args, kwargs), a tuple and a dict; found {found!r}")
        return Example(tuple(found[0]), found[1])

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """What `undo` makes of an output."""
        return self.undo(output)
