"""TF32 on or off for a while, through whichever of PyTorch's two interfaces the program uses, and then as it was.

A program that has set `fp32_precision` (2.9) can no longer read the flags that came before it, and one that has set
those must find them readable inside too: Inductor reads `torch.get_float32_matmul_precision()` while it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch

from ampcheck.core.errors import UsageError

_MATMUL = ("cuda.matmul", "mkldnn.matmul")
_CUDNN = ("cudnn.conv", "cudnn.rnn")


def tf32(precision: str, kind: str) -> Callable[[], AbstractContextManager[None]]:
    """A context in which TF32 is on, for `tf32`, or off, for `float32`; for other precisions one that does nothing.

    kind: of the device. Raises `UsageError` for TF32 where there is none.
    """
    if kind != "cuda":
        if precision == "tf32":
            raise UsageError(f"TF32 is a mode of NVIDIA's tensor cores, and the device is {kind}: leave tf32 out")
        return nullcontext
    if precision not in ("float32", "tf32"):
        return nullcontext

    @contextmanager
    def switched() -> Iterator[None]:
        with _matmul(precision == "tf32"), _cudnn(precision == "tf32"):
            yield

    return switched


@contextmanager
def _matmul(wanted: bool) -> Iterator[None]:
    before, finer = _read(torch.get_float32_matmul_precision), _finer(_MATMUL)
    if before is None:
        _set("cuda.matmul", "tf32" if wanted else "ieee")
    else:
        torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for name, value in finer.items():  # the old interface leaves `none` at `ieee`
            _set(name, value)


@contextmanager
def _cudnn(wanted: bool) -> Iterator[None]:
    flags: Any = torch.backends.cudnn
    before, finer = _read(lambda: flags.allow_tf32), _finer(_CUDNN)
    if before is not None:
        flags.allow_tf32 = wanted  # off becomes `none`, which the old interface can still read
    for name in finer:
        if (attrgetter(name)(torch.backends).fp32_precision == "tf32") is not wanted:
            _set(name, "tf32" if wanted else "ieee")
    try:
        yield
    finally:
        if before is not None:
            flags.allow_tf32 = before
        for name, value in finer.items():
            _set(name, value)


def _read(flag: Callable[[], Any]) -> Any:
    """An old flag; None where PyTorch refuses to read it, since the program has set its successor."""
    try:
        return flag()
    except RuntimeError:
        return None


def _finer(names: tuple[str, ...]) -> dict[str, str]:
    """The new flags of these parts of `torch.backends`, where this PyTorch has them."""
    parts = {name: attrgetter(name)(torch.backends) for name in names if _has(name)}
    return {name: part.fp32_precision for name, part in parts.items() if hasattr(part, "fp32_precision")}


def _has(name: str) -> bool:
    holder, _, part = name.partition(".")
    return hasattr(getattr(torch.backends, holder, None), part)


def _set(name: str, value: str) -> None:
    attrgetter(name)(torch.backends).fp32_precision = value
