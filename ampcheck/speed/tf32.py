"""TF32 on or off for a while, through the interface of PyTorch that the program uses; then all flags are restored.

A program that has set `fp32_precision` (2.9) can no longer read the older flags, and one that has set those must be
able to read them inside: Inductor reads `torch.get_float32_matmul_precision()` while it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from ampcheck.core.errors import UsageError
from ampcheck.torchtools.global_state import setting


def tf32(precision: str, kind: str) -> Callable[[], AbstractContextManager[None]]:
    """A context in which TF32 is on, for `tf32`, or off, for `float32`; for other precisions one that does nothing.

    kind: of the device. Raises `UsageError` for TF32 on another device than CUDA.
    """
    if kind != "cuda":
        if precision == "tf32":
            raise UsageError(f"TF32 is a mode of NVIDIA's tensor cores, and the device is {kind}: leave tf32 out")
        return nullcontext
    return partial(_switched, precision == "tf32") if precision in ("float32", "tf32") else nullcontext


@contextmanager
def _switched(on: bool) -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    older = [setting(cudnn, "allow_tf32"), (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)]
    owners = ((torch.backends.mkldnn, "matmul"), (cudnn, "conv"), (cudnn, "rnn"))
    parts = [matmul, *(getattr(owner, name, None) for owner, name in owners)]
    newer = [setting(part, "fp32_precision") for part in parts if hasattr(part, "fp32_precision")]
    # In the order of restoring: the older interface leaves `none` at `ieee`.
    before = [(write, _read(read)) for read, write in (*older, *newer)]
    convolution, product = before[0][1], before[1][1]
    if product is None:
        matmul.fp32_precision = "tf32" if on else "ieee"
    else:
        torch.set_float32_matmul_precision("high" if on else "highest")
    if convolution is not None:
        cudnn.allow_tf32 = on  # off becomes `none`, which the older interface can still read
    for read, write in newer[2:]:
        if (read() == "tf32") is not on:
            write("tf32" if on else "ieee")
    try:
        yield
    finally:
        for write, value in before:
            if value is not None:
                write(value)


def _read(flag: Callable[[], object]) -> object:
    """A flag; None where PyTorch refuses to read an older one, since the program has set its successor."""
    try:
        return flag()
    except RuntimeError:
        return None
