"""The arguments of one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ampcheck.core.subject import Call
from ampcheck.torchtools.pytree import map_tensors, tensors


class Example(Call):
    """The arguments of one call, which a search changes, compares and writes down."""

    __slots__ = ()

    @property
    def values(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and keywords."""
        return self.args, dict(self.kwargs)

    def floats(self) -> dict[str, torch.Tensor]:
        """The floating tensors by a path that is the same in every copy."""
        named = tensors({"args": self.args, "kwargs": dict(self.kwargs)})
        return {path: tensor for path, tensor in named if tensor.is_floating_point()}

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Example:
        """A copy with `function` applied to every tensor."""
        return Example(*map_tensors(function, self.values))

    def replaced(self, changed: Mapping[str, torch.Tensor]) -> Example:
        """A copy with other tensors in the place of those that `changed` names by path."""
        by_id = {id(tensor): changed[path] for path, tensor in self.floats().items() if path in changed}
        return self.mapped(lambda tensor: by_id.get(id(tensor), tensor))

    def copied(self, device: str) -> Example:
        """A copy that a model may write to."""
        detached = self.mapped(torch.Tensor.detach)
        return Example(*copy.deepcopy(detached.values)).mapped(lambda tensor: tensor.to(device))

    def widened(self, device: str) -> Example:
        """A copy whose floating tensors are float64, complex ones complex128."""

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
            return tensor.detach().to(device, torch.complex128 if tensor.is_complex() else wide, copy=True)

        return self.mapped(widen)

    def key(self) -> tuple[Any, ...]:
        """Equal for the same example alone, bit by bit."""
        plain = repr(map_tensors(lambda tensor: None, self.values))
        return (*((path, _bits(tensor)) for path, tensor in tensors(self.values)), plain)

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel() for _, tensor in tensors(self.values))

    def code(self) -> str:
        """The example as a strategy gives it, as code: a lone tensor by itself."""
        from ampcheck.strategies import as_code  # needs Hypothesis

        if self.kwargs:
            return as_code(self.values)
        return as_code(self.args[0] if len(self.args) == 1 else self.args)


def as_example(drawn: object) -> Example:
    """A tensor is the one argument, a tuple the positional ones; `(args, kwargs)` is a tuple and a mapping of names."""
    if isinstance(drawn, tuple) and len(drawn) == 2 and isinstance(drawn[0], tuple) and isinstance(drawn[1], dict):
        return Example(drawn[0], drawn[1])
    return Example(drawn) if isinstance(drawn, tuple) else Example((drawn,))


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (repr(tensor),)
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), values.view(torch.uint8).numpy().tobytes()
