"""The inputs that a search draws from for a model that came with example inputs, and no strategy."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Call, Kind, Subject
from ampcheck.strategies import tensors
from ampcheck.torchtools import pytree

Range = tuple[float, float]


def inputs_of(subject: Subject, domain: Range | None = None) -> st.SearchStrategy[Any]:
    """The strategy that a subject has in the place of its arguments, or else one for inputs like its first call.

    Tensors keep their shape and dtype. Floating ones are drawn from `domain`, by default from the lowest to the highest
    value of the example, integers from theirs; what has no range (a mask, a constant, infinities) stays as it is.
    Raises `UsageError` for a subject without arguments, and where nothing can be drawn.
    """
    if subject.kind not in (Kind.FORWARD, Kind.COMPILE):
        raise UsageError(
            f"{subject.name} is of kind {subject.kind.value}: a search needs (model, args) or (model, strategy)"
        )
    call = subject.calls[0]
    if len(call.args) == 1 and not call.kwargs and isinstance(call.args[0], st.SearchStrategy):
        return call.args[0]
    drawn = {
        id(tensor): strategy
        for _, tensor in pytree.tensors((call.args, dict(call.kwargs)))
        if (strategy := _like(tensor, domain)) is not None
    }
    if not drawn:
        raise UsageError(
            f"{subject.name} has no tensor among its arguments to draw other values for: return (model, strategy), "
            "such as ampcheck.strategies.tensors('float32', shape=(4, 16))"
        )
    return _calls(call, drawn)


@st.composite
def _calls(draw: st.DrawFn, call: Call, drawn: dict[int, st.SearchStrategy[torch.Tensor]]) -> Any:
    values = {key: draw(strategy) for key, strategy in drawn.items()}
    args, kwargs = pytree.map_tensors(lambda tensor: values.get(id(tensor), tensor), (call.args, dict(call.kwargs)))
    return args, kwargs


def _like(tensor: torch.Tensor, domain: Range | None) -> st.SearchStrategy[torch.Tensor] | None:
    """Tensors of the same shape and dtype; None for one that stays as it is."""
    whole = not tensor.is_floating_point()
    if tensor.layout is not torch.strided or tensor.dtype is torch.bool or tensor.is_complex() or not tensor.numel():
        return None
    low, high = (float(value) for value in tensor.detach().double().aminmax())
    if not low < high or not torch.isfinite(tensor).all():
        return None
    if domain is not None and not whole:
        low, high = domain
    return tensors(tensor.dtype, shape=tuple(tensor.shape), min_value=low, max_value=high)
