"""Numbers that leave the run without an op: to NumPy, to Python, to other libraries, to a pickle."""

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


@contextmanager
def watched_escapes(escaped: Escaped, entered: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `escaped` for every tensor that leaves, and `entered` for every one that `torch.from_numpy` makes."""

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

    with ExitStack() as patches:
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
