"""Invariances that a user declares: other inputs that must give the same result, or one that is known from it.

`inputs` names the arguments that change, by position or keyword; by default all of them. A mask or a scale beside the
data is left out by it: `Shift(1.0, inputs=(0,))`, `Padding(inputs=("hidden", "mask"))`. Scale and Shift expect integers
and bools among the outputs to stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ampcheck.core.errors import UsageError
from ampcheck.search.example import Example
from ampcheck.torchtools.pytree import map_tensors

Inputs = Sequence[int | str] | None
"""Arguments by position or keyword; None for all of them."""


class Invariance(Protocol):
    """What `assert_property(invariances=...)` takes: `undone(f(changed(x))) == f(x)`."""

    @property
    def name(self) -> str:
        """What findings call it."""

    def changed(self, example: Example) -> Example:
        """The other inputs."""

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """An output at the other inputs as it is to be at the first."""


def _change(example: Example, inputs: Inputs, function: Callable[[torch.Tensor], torch.Tensor]) -> Example:
    """The example with `function` applied to the tensors of the arguments that `inputs` names."""
    if inputs is None:
        return example.mapped(function)
    here = [*range(len(example.args)), *example.kwargs]
    if absent := [one for one in inputs if one not in here]:
        raise UsageError(
            f"inputs of an invariance must be arguments, here {', '.join(map(repr, here))}; found {absent[0]!r}"
        )
    args = tuple(map_tensors(function, one) if at in inputs else one for at, one in enumerate(example.args))
    return Example(args, {k: map_tensors(function, v) if k in inputs else v for k, v in example.kwargs.items()})


def _of(inputs: Inputs) -> str:
    return "" if inputs is None else f" of inputs {', '.join(map(repr, inputs))}"


def _require_inputs(inputs: Inputs) -> None:
    listed = isinstance(inputs, (tuple, list)) and len(inputs) > 0
    if inputs is None or (listed and all(type(one) in (int, str) for one in inputs)):
        return
    raise UsageError(f"inputs of an invariance must be positions or keywords, such as (0, 'mask'); found {inputs!r}")


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Reversing the samples along `dim` of every input, or of those named, reverses them in every output."""

    dim: int = 0
    inputs: Inputs = None

    def __post_init__(self) -> None:
        """Refuse what names no arguments."""
        _require_inputs(self.inputs)

    @property
    def name(self) -> str:
        """What findings call it."""
        return f"batch order along dimension {self.dim}{_of(self.inputs)}"

    def changed(self, example: Example) -> Example:
        """Every tensor that has the dimension, reversed."""
        return _change(example, self.inputs, self.undone)

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Reversed again."""
        return output.flip(self.dim) if -output.dim() <= self.dim < output.dim() else output


@dataclass(frozen=True, slots=True)
class Scale:
    """Inputs times `factor` give the result times `factor ** degree`: 0 for a norm layer, 1 for a homogeneous one."""

    factor: float = 2.0
    degree: float = 0.0
    inputs: Inputs = None

    def __post_init__(self) -> None:
        """Refuse what is no factor."""
        _require_inputs(self.inputs)
        if not (math.isfinite(self.factor) and self.factor != 0 and math.isfinite(self.degree)):
            raise UsageError(f"Scale needs a finite factor other than 0 and a finite degree; found {self!r}")

    @property
    def name(self) -> str:
        """What findings call it."""
        degree = f" to the power {self.degree:g}" if self.degree else ""
        return f"scale by {self.factor:g}{degree}{_of(self.inputs)}"

    def changed(self, example: Example) -> Example:
        """Floating inputs times the factor."""
        return _change(example, self.inputs, lambda t: t * self.factor if t.is_floating_point() else t)

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs over the power of the factor."""
        return output / self.factor**self.degree if output.is_floating_point() else output


@dataclass(frozen=True, slots=True)
class Shift:
    """Adding `amount` to the inputs changes nothing (softmax, variance), or moves the result by `result` (mean)."""

    amount: float = 1.0
    result: float = 0.0
    inputs: Inputs = None

    def __post_init__(self) -> None:
        """Refuse what is no amount."""
        _require_inputs(self.inputs)
        if not (math.isfinite(self.amount) and math.isfinite(self.result)):
            raise UsageError(f"Shift needs a finite amount and result; found {self!r}")

    @property
    def name(self) -> str:
        """What findings call it."""
        result = f" moving the result by {self.result:g}" if self.result else ""
        return f"shift by {self.amount:g}{_of(self.inputs)}{result}"

    def changed(self, example: Example) -> Example:
        """Floating inputs plus the amount."""
        return _change(example, self.inputs, lambda t: t + self.amount if t.is_floating_point() else t)

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs less what they move by."""
        return output - self.result if output.is_floating_point() else output


@dataclass(frozen=True, slots=True)
class Padding:
    """`count` elements of `value` behind the inputs along `dim` leave the other outputs as they are."""

    dim: int = -1
    count: int = 1
    value: float = 0.0
    inputs: Inputs = None

    def __post_init__(self) -> None:
        """Refuse padding by nothing."""
        _require_inputs(self.inputs)
        if self.count < 1:
            raise UsageError(f"Padding needs a count of at least 1; found {self.count}")

    @property
    def name(self) -> str:
        """What findings call it."""
        of = f" by {self.count} of {self.value:g}" if (self.count, self.value) != (1, 0.0) else ""
        return f"padding along dimension {self.dim}{of}{_of(self.inputs)}"

    def changed(self, example: Example) -> Example:
        """Every tensor that has the dimension, longer."""

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            if not -tensor.dim() <= self.dim < tensor.dim():
                return tensor
            sides = list(tensor.shape)
            sides[self.dim] = self.count
            return torch.cat([tensor, tensor.new_full(sides, self.value)], self.dim)

        return _change(example, self.inputs, padded)

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
