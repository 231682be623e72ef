"""Reads the arguments of recorded calls: losses, gradients, checkpoints, limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ampcheck.facts.memory import dtype_name
from ampcheck.torchtools.private import without_modes
from ampcheck.torchtools.pytree import tensors


def are_own(grads: object) -> bool:
    """Return whether backward starts from gradients that the step computed itself, not from the 1 of a loss."""
    return any(grad.numel() != 1 or float(grad) != 1.0 for _, grad in tensors(grads))


def states_in(content: object, depth: int = 3) -> Iterator[str]:
    """Return whether something that is saved contains the state of an `optimizer` or of a `scaler`."""
    if not isinstance(content, dict) or not depth:
        return
    if {"state", "param_groups"} <= content.keys():
        yield "optimizer"
    elif {"scale", "growth_factor", "_growth_tracker"} <= content.keys():
        yield "scaler"
    else:
        for value in content.values():
            yield from states_in(value, depth - 1)


def limit_of(args: Sequence[object], kwargs: Mapping[str, object]) -> float | None:
    """The norm or value that gradients are clipped to, by the arguments after the parameters; None for no number."""
    limit: Any = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
    with without_modes(), suppress(TypeError, ValueError, RuntimeError):
        return float(limit)
    return None


def dtype_of(outputs: object) -> str:
    """The dtype of the first tensor, such as a loss; empty where there is none."""
    return next((dtype_name(tensor.dtype) for _, tensor in tensors(outputs)), "")
