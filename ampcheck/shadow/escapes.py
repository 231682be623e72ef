"""Numbers that leave the run without an op, to NumPy, Python, other libraries or a pickle, and that enter it so."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ampcheck.torchtools.patching import around_exports, attribute, observed, once_imported, originals, replaced
from ampcheck.torchtools.private import current_mode, register_scripted_op, scripted_op, scripted_ops, without_modes

_SHARED = ("numpy", "__dlpack__")
_COPIED = ("tolist", "__reduce_ex__")

_MAKERS = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (torch.Tensor, "new_tensor"))
"""Functions that make a tensor of numbers before any op: a dispatch mode sees the tensor after its rounding."""


def exports_of_the_user() -> AbstractContextManager[None]:
    """Strict exports capture PyTorch's own functions, not those that take their place here."""
    methods = ((torch.Tensor, name) for name in _SHARED + _COPIED)
    functions = (*_MAKERS, *methods, (torch, "from_numpy"), (torch, "cond"))
    return around_exports(lambda: originals(functions))


@contextmanager
def watched_escapes(
    escaped: Callable[[torch.Tensor, bool], None], entered: Callable[[torch.Tensor], None]
) -> Iterator[None]:
    """Call `escaped` for every tensor that leaves, before it does, and with whether its memory leaves with it; and
    `entered` for every one that `torch.from_numpy` makes."""

    def leave(shared: bool, tensor: torch.Tensor, *_: object, **__: object) -> None:
        if _is_followed(tensor):
            escaped(tensor, shared)

    def enter(*_: object, **__: object) -> Generator[None, torch.Tensor, None]:
        tensor = yield
        if _is_followed(tensor):
            entered(tensor)

    with ExitStack() as patches:
        for name in _SHARED + _COPIED:
            patches.enter_context(observed(torch.Tensor, name, partial(leave, name in _SHARED)))
        patches.enter_context(observed(torch, "from_numpy", enter))
        yield


def eager_flex_attention() -> AbstractContextManager[None]:
    """Let `flex_attention` call its op directly: under a dispatch mode it cannot compile itself, and raises."""
    return once_imported("torch.nn.attention.flex_attention", _called_directly)


def _called_directly(module: ModuleType) -> AbstractContextManager[None]:
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    return attribute(module, name, True) if hasattr(module, name) else nullcontext()


@contextmanager
def eager_cond(traces: Callable[[], bool]) -> Iterator[None]:
    """Let `torch.cond` call its branch, above autograd: under a dispatch mode it cannot compile itself, and what the
    branch closes over, such as the weights of a module, would get no gradient. traces: ops are recorded, not run."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
            if current_mode() is None or traces():
                return original(pred, true_fn, false_fn, operands)
            return (true_fn if pred else false_fn)(*operands)

        return cond

    with replaced(torch, "cond", make):
        yield


def _is_followed(tensor: object) -> bool:
    return current_mode() is not None and type(tensor) in (torch.Tensor, torch.nn.Parameter)


@contextmanager
def literals_by_ops() -> Iterator[None]:
    """Let `torch.tensor(1e-8, dtype=torch.float16)` and its like round by an op, which a dispatch mode can follow.

    Only numbers that the format cannot hold are rounded once more; the values are those that the call gives.
    """
    with ExitStack() as patches:
        for owner, name in _MAKERS:
            known = scripted_op(getattr(owner, name))
            # A function mode would see these calls as well, and turn off fused kernels of PyTorch.
            patches.enter_context(replaced(owner, name, _rounding, equal=True))
            if known is not None:
                patches.enter_context(_scripted_as(getattr(owner, name), known))
        yield


@contextmanager
def _scripted_as(function: Callable[..., Any], op: str) -> Iterator[None]:
    """Let TorchScript, which looks functions up by their address, take one for an op."""
    register_scripted_op(function, op)
    try:
        yield
    finally:
        scripted_ops().pop(id(function), None)


def _rounding(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        if type(made) is not torch.Tensor or made.dtype not in (torch.float16, torch.bfloat16):
            return made  # of another dtype, or without values: a fake tensor
        data = args[-1] if args else kwargs.get("data", kwargs.get("obj"))
        return made if data is None or isinstance(data, torch.Tensor) else _rounded(made, data)

    return make


def _rounded(made: torch.Tensor, data: Any) -> torch.Tensor:
    """Return what was made of data, by an op if its format cannot hold them."""
    try:
        with without_modes(), torch.no_grad():
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
