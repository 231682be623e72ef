"""Numbers of Python and arrays of NumPy that enter the run in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils._python_dispatch import _disable_current_modes

from ampcheck.torchtools.patching import replaced

_MAKERS = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (torch.Tensor, "new_tensor"))
"""What makes a tensor of numbers before any op: a dispatch mode sees the tensor after its rounding."""


@contextmanager
def literals_by_ops() -> Iterator[None]:
    """Let `torch.tensor(1e-8, dtype=torch.float16)` and its like round by an op, which a dispatch mode can follow.

    Only numbers that the format cannot hold are rounded once more; the values are those that the call gives.
    """
    with ExitStack() as patches:
        for owner, name in _MAKERS:
            known = _builtins._find_builtin(getattr(owner, name))  # type: ignore[no-untyped-call]
            # A function mode would see these calls as well, and turn off fused kernels of PyTorch.
            patches.enter_context(replaced(owner, name, _rounding, equal=True))
            if known is not None:
                patches.enter_context(_scripted_as(getattr(owner, name), known))
        yield


@contextmanager
def _scripted_as(function: Callable[..., Any], op: str) -> Iterator[None]:
    """Let TorchScript, which looks functions up by their address, take one for an op."""
    _builtins._register_builtin(function, op)
    try:
        yield
    finally:
        _builtins._get_builtin_table().pop(id(function), None)  # type: ignore[no-untyped-call]


def _rounding(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        if type(made) is not torch.Tensor or made.dtype not in (torch.float16, torch.bfloat16):
            return made  # of another dtype, or without values: a fake tensor
        data = args[-1] if args else kwargs.get("data", kwargs.get("obj"))
        return made if data is None or isinstance(data, torch.Tensor) else _rounded(made, data)

    return make


def _rounded(made: torch.Tensor, data: Any) -> torch.Tensor:
    """What was made of data, by an op if its format cannot hold them."""
    try:
        with _disable_current_modes(), torch.no_grad():
            wide = torch.tensor(data, dtype=torch.float64, device=made.device)
            if _same(wide, made.double()) or not _same(wide.to(made.dtype), made):
                return made
    except (TypeError, ValueError, RuntimeError):  # such data have no float64: they stay as they are
        return made
    with torch.no_grad():
        rounded = wide.to(made.dtype)
    return rounded.requires_grad_() if made.requires_grad else rounded


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
