"""PyTorch's functions that are written in Python, run so that function modes see the functions that they call."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

_MODULES = ("torch.nn.functional", "torch.functional", "torch.autograd")
_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def body_of(function: Any) -> Callable[..., Any] | None:
    """A composite function without its own question for function modes, so that a mode that handles it can enter
    itself again and see what it calls; None for any other function. PyTorch would hand it to the mode again.

    It is made anew for each call: a function that is replaced meanwhile, as those of `autograd` are while somebody
    observes them, is seen.
    """
    if not isinstance(function, types.FunctionType):
        return None
    if function.__module__ not in _MODULES and function is not torch.Tensor.backward:
        return None
    if not set(_ASKS).intersection(function.__code__.co_names):
        return None
    names = {**function.__globals__, **dict.fromkeys(_ASKS, _is_not_handled)}
    body = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _is_not_handled(*_: object) -> bool:
    return False
