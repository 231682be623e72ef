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
        """The changed inputs."""

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """An output at the changed inputs, with the change undone."""


class _Change:
    """An invariance under a change of each tensor of the arguments that `inputs` names."""

    __slots__ = ()
    inputs: Inputs

    def __post_init__(self) -> None:
        listed = isinstance(self.inputs, (tuple, list)) and len(self.inputs) > 0
        if self.inputs is not None and not (listed and all(type(key) in (int, str) for key in self.inputs)):
            raise UsageError(
                f"inputs of an invariance must be positions or keywords, such as (0, 'mask'); found {self.inputs!r}"
            )
        if problem := self._refused():
            raise UsageError(f"{problem}; found {self!r}")

    @property
    def name(self) -> str:
        """What findings call it."""
        return self._title(f" of inputs {', '.join(map(repr, self.inputs))}" if self.inputs is not None else "")

    def changed(self, example: Example) -> Example:
        """The changed inputs."""
        inputs = self.inputs
        if inputs is None:
            return example.mapped(self._changed)
        here = [*range(len(example.args)), *example.kwargs]
        if absent := [key for key in inputs if key not in here]:
            raise UsageError(
                f"inputs of an invariance must be arguments, here {', '.join(map(repr, here))}; found {absent[0]!r}"
            )
        args = [map_tensors(self._changed, v) if key in inputs else v for key, v in enumerate(example.args)]
        kwargs = {key: map_tensors(self._changed, v) if key in inputs else v for key, v in example.kwargs.items()}
        return Example(tuple(args), kwargs)

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """An output at the changed inputs, with the change undone."""
        return output

    def _refused(self) -> str:
        """Why the values of the fields are refused; "" where they are not."""
        return ""

    def _title(self, of: str) -> str:
        raise NotImplementedError

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class BatchOrder(_Change):
    """Reversing the samples along `dim` of every input, or of those named, reverses them in every output."""

    dim: int = 0
    inputs: Inputs = None

    def _title(self, of: str) -> str:
        return f"batch order along dimension {self.dim}{of}"

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(self.dim) if -tensor.dim() <= self.dim < tensor.dim() else tensor

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Reversed again."""
        return self._changed(output)


@dataclass(frozen=True, slots=True)
class Scale(_Change):
    """Inputs times `factor` give the result times `factor ** degree`: 0 for a norm layer, 1 for a homogeneous one."""

    factor: float = 2.0
    degree: float = 0.0
    inputs: Inputs = None

    def _refused(self) -> str:
        numbers = math.isfinite(self.factor) and self.factor != 0 and math.isfinite(self.degree)
        return "" if numbers else "Scale needs a finite factor other than 0 and a finite degree"

    def _title(self, of: str) -> str:
        return f"scale by {self.factor:g}{f' to the power {self.degree:g}' if self.degree else ''}{of}"

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.factor if tensor.is_floating_point() else tensor

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs over the power of the factor."""
        return output / self.factor**self.degree if output.is_floating_point() else output


@dataclass(frozen=True, slots=True)
class Shift(_Change):
    """Adding `amount` to the inputs changes nothing (softmax, variance), or moves the result by `result` (mean)."""

    amount: float = 1.0
    result: float = 0.0
    inputs: Inputs = None

    def _refused(self) -> str:
        numbers = math.isfinite(self.amount) and math.isfinite(self.result)
        return "" if numbers else "Shift needs a finite amount and result"

    def _title(self, of: str) -> str:
        return f"shift by {self.amount:g}{of}{f' moving the result by {self.result:g}' if self.result else ''}"

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self.amount if tensor.is_floating_point() else tensor

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs less what they move by."""
        return output - self.result if output.is_floating_point() else output


@dataclass(frozen=True, slots=True)
class Padding(_Change):
    """`count` elements of `value` behind the inputs along `dim` leave the other outputs as they are."""

    dim: int = -1
    count: int = 1
    value: float = 0.0
    inputs: Inputs = None

    def _refused(self) -> str:
        return "" if self.count >= 1 else "Padding needs a count of at least 1"

    def _title(self, of: str) -> str:
        by = f" by {self.count} of {self.value:g}" if (self.count, self.value) != (1, 0.0) else ""
        return f"padding along dimension {self.dim}{by}{of}"

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.dim() <= self.dim < tensor.dim():
            return tensor
        sides = list(tensor.shape)
        sides[self.dim] = self.count
        return torch.cat([tensor, tensor.new_full(sides, self.value)], self.dim)

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs without what was added; an output without the dimension is unchanged."""
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
        changed = self.change(*copied[0], **copied[1])
        pair = isinstance(changed, tuple) and len(changed) == 2
        if not (pair and isinstance(changed[0], (tuple, list)) and isinstance(changed[1], dict)):
            raise UsageError(
                f"change of {self.name!r} must return (args, kwargs), a tuple and a dict; found {changed!r}"
            )
        return Example(tuple(changed[0]), changed[1])

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """What `undo` makes of an output."""
        return self.undo(output)
