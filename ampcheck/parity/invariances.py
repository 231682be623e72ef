"""Invariances: other inputs at which a function must give the same result, or one that is known from it.

`inputs` names the arguments that change, by position or keyword; by default all of them. A mask or a scale beside the
data is left out by it: `Shift(1.0, inputs=(0,))`, `Padding(inputs=("hidden", "mask"))`. Scale and Shift expect integers
and bools among the outputs to stay as they are.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ampcheck.core.errors import UsageError
from ampcheck.parity.arguments import (
    Inputs,
    VacuousError,
    has_dim,
    lengths_of,
    map_named,
    named_arguments,
    own,
    require_inputs,
)
from ampcheck.parity.circumstances import Circumstance, Function
from ampcheck.parity.example import Example
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.pytree import map_tensors, tensors

_SHAPES = ContextVar[tuple[Function | None, dict[str, torch.Size]]]("shapes", default=(None, {}))
"""A function that ran with the arguments as they are, and the shapes of its outputs by their paths: what a closure
holds is restored after a run."""


class Invariance(Circumstance):
    """A circumstance with other arguments: `undone(f(changed(x)))` must be `f(x)`."""

    __slots__ = ()

    @abstractmethod
    def changed(self, example: Example) -> Example:
        """The changed arguments."""

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """An output at the changed arguments, with the change undone."""
        return output

    def applied(self, function: Function, whole: Function | None = None) -> Function:
        """The function of changed arguments, with the change undone. whole: what ran before, with those as they are."""

        def of_changed(*args: Any, **kwargs: Any) -> Any:
            example = Example(args, kwargs)
            changed = own(self.changed, example)
            with without_modes(), torch.no_grad():
                if changed.key() == example.key():
                    hint = "give arguments that it changes"
                    raise VacuousError(f"{self.name} must change an argument, and changes none: {hint}")
            return own(self._undo, function(*changed.args, **changed.kwargs), changed, whole)

        return of_changed

    def _undo(self, outputs: Any, changed: Example, whole: Function | None) -> Any:
        """All outputs at these arguments, with the change undone."""
        return map_tensors(partial(self._undone, changed=changed), outputs)

    def _undone(self, output: torch.Tensor, changed: Example) -> torch.Tensor:
        """One output at these arguments, with the change undone."""
        return self.undone(output)


class _OfTensors(Invariance):
    """An invariance under a change of each tensor of the arguments that `inputs` names."""

    __slots__ = ()
    inputs: Inputs

    def __post_init__(self) -> None:
        require_inputs(self)
        if problem := self._refused():
            raise UsageError(f"{problem}; found {self!r}")

    def changed(self, example: Example) -> Example:
        """The changed arguments."""
        named_arguments(self, *example.values)
        return Example(*map_named(self._changed, example.args, example.kwargs, self.inputs))

    def _refused(self) -> str:
        """Why the values of the fields are refused; "" where they are not."""
        return ""

    @abstractmethod
    def _changed(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def _is_as_long(self, output: torch.Tensor, changed: Example, dim: int) -> bool:
        """Return whether an output is as long as one of the changed arguments: one that is summed over is not."""
        return has_dim(output, dim) and output.shape[dim] in lengths_of(named_arguments(self, *changed.values), dim)

    @property
    def _of(self) -> str:
        return f" of inputs {', '.join(map(repr, self.inputs))}" if self.inputs is not None else ""


@dataclass(frozen=True, slots=True)
class BatchOrder(_OfTensors):
    """Reversing the samples along `dim` of every input, or of those named, reverses them in every output as long."""

    dim: int = 0
    inputs: Inputs = None

    def _title(self) -> str:
        return f"batch order along dimension {self.dim}{self._of}"

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(self.dim) if has_dim(tensor, self.dim) else tensor

    def _undone(self, output: torch.Tensor, changed: Example) -> torch.Tensor:
        return output.flip(self.dim) if self._is_as_long(output, changed, self.dim) else output


@dataclass(frozen=True, slots=True)
class Scale(_OfTensors):
    """Inputs times `factor` give the result times `factor ** degree`: 0 for a norm layer, 1 for a homogeneous one."""

    factor: float = 2.0
    degree: float = 0.0
    inputs: Inputs = None

    def _title(self) -> str:
        return f"scale by {self.factor:g}{f' to the power {self.degree:g}' if self.degree else ''}{self._of}"

    def _refused(self) -> str:
        numbers = math.isfinite(self.factor) and self.factor != 0 and math.isfinite(self.degree)
        return "" if numbers else "Scale needs a finite factor other than 0 and a finite degree"

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.factor if tensor.is_floating_point() else tensor

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs over the power of the factor."""
        return output / self.factor**self.degree if output.is_floating_point() else output


@dataclass(frozen=True, slots=True)
class Shift(_OfTensors):
    """Adding `amount` to the inputs changes nothing (softmax, variance), or moves the result by `result` (mean)."""

    amount: float = 1.0
    result: float = 0.0
    inputs: Inputs = None

    def _title(self) -> str:
        return f"shift by {self.amount:g}{self._of}{f' moving the result by {self.result:g}' if self.result else ''}"

    def _refused(self) -> str:
        numbers = math.isfinite(self.amount) and math.isfinite(self.result)
        return "" if numbers else "Shift needs a finite amount and result"

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self.amount if tensor.is_floating_point() else tensor

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Outputs less what they move by."""
        return output - self.result if output.is_floating_point() else output


@dataclass(frozen=True, slots=True)
class Padding(_OfTensors):
    """`count` elements of `value` behind the inputs along `dim` leave the other outputs as they are.

    An output that is as long as a padded input, and was shorter before, loses what was added; others stay as they are.
    """

    dim: int = -1
    count: int = 1
    value: float = 0.0
    inputs: Inputs = None

    def _title(self) -> str:
        by = f" by {self.count} of {self.value:g}" if (self.count, self.value) != (1, 0.0) else ""
        return f"padding along dimension {self.dim}{by}{self._of}"

    def _refused(self) -> str:
        return "" if self.count >= 1 else "Padding needs a count of at least 1"

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        if not has_dim(tensor, self.dim):
            return tensor
        sides = list(tensor.shape)
        sides[self.dim] = self.count
        return torch.cat([tensor, tensor.new_full(sides, self.value)], self.dim)

    def sides(self, function: Function) -> tuple[Function, Function]:
        """The function, whose outputs show which of them have the length of the inputs, and that of padded inputs."""

        def whole(*args: Any, **kwargs: Any) -> Any:
            outputs = function(*args, **kwargs)
            _SHAPES.set((whole, {path: tensor.shape for path, tensor in tensors(outputs)}))
            return outputs

        return whole, self.applied(function, whole)

    def _undo(self, outputs: Any, changed: Example, whole: Function | None) -> Any:
        ran, shapes = _SHAPES.get()
        shapes = shapes if ran is whole else {}
        unpadded = {id(tensor) for path, tensor in tensors(outputs) if shapes.get(path) == tensor.shape}
        return map_tensors(lambda t: t if id(t) in unpadded else self._undone(t, changed), outputs)

    def _undone(self, output: torch.Tensor, changed: Example) -> torch.Tensor:
        if not self._is_as_long(output, changed, self.dim):
            return output
        return output.narrow(self.dim, 0, output.shape[self.dim] - self.count)


@dataclass(frozen=True, slots=True)
class Declared(Invariance):
    """An invariance of the user's own: `change(*args, **kwargs) -> (args, kwargs)`, and `undo(output) -> output`."""

    name: str = field()
    change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    undo: Callable[[torch.Tensor], torch.Tensor] = lambda output: output

    def _title(self) -> str:
        return self.name

    def changed(self, example: Example) -> Example:
        """Return what `change` makes of copies of the arguments."""
        args, kwargs = example.mapped(torch.clone).values
        changed = self.change(*args, **kwargs)
        pair = isinstance(changed, tuple) and len(changed) == 2
        if not (pair and isinstance(changed[0], (tuple, list)) and isinstance(changed[1], dict)):
            raise UsageError(
                f"change of {self.name!r} must return (args, kwargs), a tuple and a dict; found {changed!r}"
            )
        return Example(tuple(changed[0]), changed[1])

    def undone(self, output: torch.Tensor) -> torch.Tensor:
        """Return what `undo` makes of an output."""
        return self.undo(output)


def as_circumstance(value: Any) -> Circumstance | None:
    """A circumstance, or an object with `name`, `changed` and `undone` as one; None of anything else."""
    if isinstance(value, Circumstance):
        return value
    methods = all(callable(getattr(value, method, None)) for method in ("changed", "undone"))
    if not methods or not hasattr(value, "name") or isinstance(value, type):
        return None

    def change(*args: Any, **kwargs: Any) -> Any:
        changed = value.changed(Example(args, kwargs))
        return tuple(changed.args), dict(changed.kwargs)

    return Declared(value.name, change, value.undone)
