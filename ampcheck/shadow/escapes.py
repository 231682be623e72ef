"""Numbers that leave the run without an op: to NumPy, to Python, to other libraries, to a pickle; and that enter it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ampcheck.torchtools.patching import once_imported, replaced


class Escaped(Protocol):
    """What is called with a tensor that leaves, before it leaves. shared: its memory leaves with it."""

    def __call__(self, tensor: torch.Tensor, *, shared: bool) -> None:
        """Note a tensor that leaves."""


_SHARED = ("numpy", "__dlpack__")
_COPIED = ("tolist", "__reduce_ex__")

_FACTORIES = ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor"))
"""What makes tensors of the numbers of Python and NumPy, and rounds them without an op."""


@contextmanager
def watched_escapes(escaped: Escaped, entered: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `escaped` for every tensor that leaves, and `entered` for every one that `torch.from_numpy` makes.

    Numbers that enter in 16 bits are rounded to them by an op, which can be followed, to the same bits.
    """

    def leaving(original: Callable[..., Any], shared: bool) -> Callable[..., Any]:
        def leave(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if _is_followed(tensor):
                escaped(tensor, shared=shared)
            return original(tensor, *args, **kwargs)

        return leave

    def entering(original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(*args: Any, **kwargs: Any) -> Any:
            tensor = original(*args, **kwargs)
            if _is_followed(tensor):
                entered(tensor)
            return tensor

        return enter

    def rounding(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            tensor = original(*args, **kwargs)
            if not _is_followed(tensor) or not tensor.is_floating_point() or tensor.itemsize != 2:
                return tensor
            if any(getattr(value, "itemsize", 8) <= 2 for value in (args[-1:] or kwargs.values())):
                return tensor  # of the same format already; it may share memory
            wide = {**kwargs, "dtype": torch.float32} | ({"requires_grad": False} if "requires_grad" in kwargs else {})
            return original(*args, **wide).to(tensor.dtype).requires_grad_(tensor.requires_grad)

        return make

    with ExitStack() as patches:
        for owner, name in _FACTORIES:
            patches.enter_context(replaced(owner, name, rounding))
        for name in _SHARED + _COPIED:
            make = partial(leaving, shared=name in _SHARED)
            patches.enter_context(replaced(torch.Tensor, name, make))
        patches.enter_context(replaced(torch, "from_numpy", entering))
        yield


def eager_flex_attention() -> AbstractContextManager[None]:
    """Let `flex_attention` call its op directly: under a dispatch mode it cannot compile itself, and raises."""
    return once_imported("torch.nn.attention.flex_attention", _called_directly)


@contextmanager
def _called_directly(module: ModuleType) -> Iterator[None]:
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if not hasattr(module, name):
        yield
        return
    before = getattr(module, name)
    setattr(module, name, True)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def eager_cond(traces: Callable[[], bool]) -> Iterator[None]:
    """Let `torch.cond` call its branch, above autograd: under a dispatch mode it cannot compile itself, and what the
    branch closes over, such as the weights of a module, would get no gradient. traces: ops are recorded, not run."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
            if _get_current_dispatch_mode() is None or traces():
                return original(pred, true_fn, false_fn, operands)
            return (true_fn if pred else false_fn)(*operands)

        return cond

    with replaced(torch, "cond", make):
        yield


def _is_followed(tensor: object) -> bool:
    return _get_current_dispatch_mode() is not None and type(tensor) in (torch.Tensor, torch.nn.Parameter)
