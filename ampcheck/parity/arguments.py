"""Arguments under a circumstance: those that `inputs` names are changed, or taken in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ampcheck.core.errors import UsageError
from ampcheck.torchtools.pytree import map_tensors, tensors

Inputs: TypeAlias = Sequence[int | str] | None
"""Arguments by position or keyword; None for all of them."""


class VacuousError(UsageError):
    """With these arguments a circumstance changes nothing, or has no parts that are smaller than the whole."""


class OwnOps(torch.nn.Module):
    """Marks the ops of a circumstance, so that findings name the ops of the function alone."""

    def forward(self, run: Callable[[], Any]) -> None:
        """Run it; a result would be one of the function."""
        run()

    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """None: as the root of others it would have no name."""
        return iter(())


def own(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function of a circumstance, whose ops are its own."""
    returned: list[Any] = []
    OwnOps()(lambda: returned.append(function(*args)))
    return returned[0]


def require_inputs(circumstance: Any) -> None:
    """Raise `UsageError` unless `inputs` of a circumstance are positions and keywords."""
    inputs = circumstance.inputs
    listed = isinstance(inputs, (tuple, list)) and len(inputs) > 0
    if inputs is not None and not (listed and all(type(key) in (int, str) for key in inputs)):
        raise UsageError(
            f"inputs of {type(circumstance).__name__} must be positions or keywords, such as (0, 'mask'); found "
            f"{inputs!r:.80}"
        )


def named_arguments(circumstance: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that `inputs` of a circumstance names. Raises `UsageError` for a name that is none."""
    values: dict[int | str, Any] = dict(enumerate(args))
    values.update(kwargs.items())
    if absent := [key for key in circumstance.inputs or () if key not in values]:
        raise UsageError(
            f"inputs of {type(circumstance).__name__} must be arguments, here {', '.join(map(repr, values))}; found "
            f"{absent[0]!r}"
        )
    return [value for key, value in values.items() if circumstance.inputs is None or key in circumstance.inputs]


def length_of(values: Any, dim: int) -> int:
    """The length along `dim` of the first tensor that has it."""
    lengths = lengths_of(values, dim)
    if not lengths:
        raise UsageError(f"no tensor among the arguments has a dimension {dim} to split")
    return lengths[0]


def lengths_of(values: Any, dim: int) -> list[int]:
    """The lengths along `dim` of the tensors that have it."""
    return [t.shape[dim] for _, t in tensors(values) if has_dim(t, dim)]


def has_dim(tensor: torch.Tensor, dim: int) -> bool:
    """Return whether a tensor has this dimension."""
    return -tensor.dim() <= dim < tensor.dim()


def is_as_long(tensor: torch.Tensor, dim: int, length: int) -> bool:
    """Return whether a tensor has this length along a dimension."""
    return has_dim(tensor, dim) and tensor.shape[dim] == length


def map_named(
    function: Callable[[torch.Tensor], torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Inputs = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with `function` applied to each tensor of those that `inputs` names."""
    mapped = {
        key: map_tensors(function, value) if inputs is None or key in inputs else value
        for key, value in (*enumerate(args), *kwargs.items())
    }
    return tuple(mapped[number] for number in range(len(args))), {key: mapped[key] for key in kwargs}


def parts_of(
    args: Sequence[Any], kwargs: dict[str, Any], size: int, dim: int, inputs: Inputs, length: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], float]]:
    """The arguments in parts of `size` along `dim`, each with its share of the whole. inputs: those that are split, of
    this length."""
    require_parts(length, size, dim)
    for start in range(0, length, size):
        count = min(size, length - start)

        def part(tensor: torch.Tensor, start: int = start, count: int = count) -> torch.Tensor:
            return tensor.narrow(dim, start, count) if is_as_long(tensor, dim, length) else tensor

        yield *own(map_named, part, args, kwargs, inputs), count / length


def require_parts(length: int, size: int, dim: int) -> None:
    """Raise where parts of `size` are the whole, which a comparison with itself says nothing of."""
    if length <= size:
        raise VacuousError(
            f"parts of {size} along dimension {dim} must be smaller than the whole; found a length of {length}: "
            "give longer arguments or smaller parts"
        )
