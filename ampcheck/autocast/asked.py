"""Code that asks for CUDA on a machine without it: it is judged again, from the start, with CUDA emulated on the CPU.

PyTorch raises where such code places a tensor, and switches its autocast regions and its scaler off with a warning: it
would train in float32, unscaled, and nothing of what it does on a GPU would be judged.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from ampcheck.autocast.device import is_present
from ampcheck.autocast.emulate import active
from ampcheck.core.errors import AsksForCUDA
from ampcheck.torchtools.patching import replaced
from ampcheck.torchtools.source import is_users

_P = ParamSpec("_P")
_T = TypeVar("_T")


def on_cpu_or_cuda(judge: Callable[[str], _T], device: str | None) -> _T:
    """`judge(device)`. Without a device that is the CPU, or CUDA, emulated, where the code asks for CUDA.

    Modules of the user that were imported meanwhile are imported again then.
    """
    if device:
        return judge(device)
    if is_present("cuda") or active() is not None:
        return judge("cpu")
    before = set(sys.modules)
    try:
        with _asking():
            return judge("cpu")
    except AsksForCUDA:
        for name in sys.modules.keys() - before:
            if _is_own(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]
    return judge("cuda")


def cuda_where_asked(judge: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function of a model with a keyword `device`, whose None is the CPU, or CUDA where the model asks for it."""

    @functools.wraps(judge)
    def within(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        __tracebackhide__ = True
        device: Any = kwargs.pop("device", None)
        return on_cpu_or_cuda(lambda there: judge(*args, **{**kwargs, "device": there}), device)  # type: ignore[arg-type]

    return within


def _is_own(file: str | None) -> bool:
    """Whether a file is the user's and of no installed package, which may not be importable twice."""
    return bool(file) and is_users(str(file)) and f"{os.sep}site-packages{os.sep}" not in str(file)


@contextmanager
def _asking() -> Iterator[None]:
    """Raise `AsksForCUDA` inside where the user's code needs CUDA or asks for its autocast or its scaler by name."""
    with ExitStack() as stack:
        for name in ("_lazy_init", "set_device"):
            stack.enter_context(replaced(torch.cuda, name, _make_raising))
        stack.enter_context(replaced(torch.autocast, "__init__", _make_raising_for_cuda))
        stack.enter_context(replaced(torch.amp.GradScaler, "__init__", _make_raising_for_cuda))
        yield


def _make_raising(original: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        raise AsksForCUDA

    return ask


def _make_raising_for_cuda(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a region or a scaler; `GradScaler()` alone is one for CUDA."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        device = args[0] if args else kwargs.get("device_type", kwargs.get("device", "cuda"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA is not available")  # it is emulated then
            original(self, *args, **kwargs)
        if device == "cuda" and kwargs.get("enabled", True) and not self._enabled:
            raise AsksForCUDA

    return init
