"""The objects of PyTorch's contexts, such as `torch.autocast`, that code enters: no guard reads their attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampcheck.torchtools.closures import children, walk

Attributes = list[tuple[Any, dict[str, Any]]]
"""Contexts with their attributes, but for those that entering one sets."""


def contexts_of(root: object) -> list[object]:
    """The contexts that functions and modules of a callable have in closures, globals and attributes."""
    values = [
        child
        for value in walk(root)
        for part in (value.modules() if isinstance(value, torch.nn.Module) else [value])
        for child in (vars(part).values() if isinstance(part, torch.nn.Module) else dict(children(part)).values())
    ]
    found = {id(v): v for v in values if type(v).__module__.startswith("torch.") and hasattr(type(v), "__enter__")}
    return [context for context in found.values() if isinstance(getattr(context, "__dict__", None), dict)]


def attributes(contexts: Sequence[object]) -> Attributes:
    """The attributes of contexts as they are now."""
    return [(c, {name: v for name, v in vars(c).items() if not name.startswith("prev")}) for c in contexts]


def set_attributes(contexts: Attributes) -> None:
    """Give contexts the attributes that they had."""
    for context, values in contexts:
        for name, value in values.items():
            setattr(context, name, value)
