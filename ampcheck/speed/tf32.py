"""TF32 on or off for a while, through the interface of PyTorch that the program uses; then all flags are restored.

A program that has set `fp32_precision` (2.9) can no longer read the older flags, and one that has set those must be
able to read them inside: Inductor reads `torch.get_float32_matmul_precision()` while it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import TypeVar

import torch

from ampcheck.core.errors import UsageError

_T = TypeVar("_T")
_MATMUL = ("cuda.matmul", "mkldnn.matmul")
_CUDNN = ("cudnn.conv", "cudnn.rnn")


def tf32(precision: str, kind: str) -> Callable[[], AbstractContextManager[None]]:
    """A context in which TF32 is on, for `tf32`, or off, for `float32`; for other precisions one that does nothing.

    kind: of the device. Raises `UsageError` for TF32 on another device than CUDA.
    """
    if kind != "cuda":
        if precision == "tf32":
            raise UsageError(f"TF32 is a mode of NVIDIA's tensor cores, and the device is {kind}: leave tf32 out")
        return nullcontext
    return _with_tf32(precision == "tf32") if precision in ("float32", "tf32") else nullcontext


def _with_tf32(on: bool) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def context() -> Iterator[None]:
        cudnn = torch.backends.cudnn
        matmul, convolution = _read(torch.get_float32_matmul_precision), _read(lambda: cudnn.allow_tf32)
        newer = {name: value for name in (*_MATMUL, *_CUDNN) if (value := _precision(name)) is not None}
        if matmul is None:
            _set("cuda.matmul", on)
        else:
            torch.set_float32_matmul_precision("high" if on else "highest")
        if convolution is not None:
            cudnn.allow_tf32 = on  # off becomes `none`, which the older interface can still read
        for name in newer.keys() & set(_CUDNN):
            if (_precision(name) == "tf32") is not on:
                _set(name, on)
        try:
            yield
        finally:
            if convolution is not None:
                cudnn.allow_tf32 = convolution
            if matmul is not None:
                torch.set_float32_matmul_precision(matmul)
            for name, value in newer.items():  # the older interface leaves `none` at `ieee`
                attrgetter(name)(torch.backends).fp32_precision = value

    return context


def _read(flag: Callable[[], _T]) -> _T | None:
    """An older flag; None where PyTorch refuses to read it, since the program has set its successor."""
    try:
        return flag()
    except RuntimeError:
        return None


def _precision(name: str) -> str | None:
    """The newer flag of a part of `torch.backends`; None where this PyTorch has none."""
    holder, _, part = name.partition(".")
    value: str | None = getattr(getattr(getattr(torch.backends, holder, None), part, None), "fp32_precision", None)
    return value


def _set(name: str, on: bool) -> None:
    attrgetter(name)(torch.backends).fp32_precision = "tf32" if on else "ieee"
