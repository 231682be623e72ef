"""What this machine lacks: why a run raised, and a substitute for missing 16-bit kernels.

The substitute is for ops without a 16-bit kernel on the CPU while another device is emulated that has one.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

from ampcheck.autocast.emulate import active
from ampcheck.autocast.kernels import float32_of_16_bit, is_16_bit
from ampcheck.core.errors import brief, message_of
from ampcheck.torchtools.modes import DispatchMode
from ampcheck.torchtools.pytree import map_tensors, tensors
from ampcheck.torchtools.unsupported import machine_error

_NO_KERNEL = re.compile("not (implemented|supported) for '?(Half|BFloat16)")

_ON_NO_DEVICE = re.compile("linalg|cholesky|svd|(?<!w)eig|(?<!s)qr|(?<![a-z])lu(?![a-z])|lstsq|triangular|ldl")
"""Linear algebra in 16 bits exists on no device: cuSOLVER and MAGMA are called for float32 and wider alone. Weights,
square roots and `relu_` do not match."""


def lacking(error: BaseException, *, kernels: bool = False) -> str:
    """What this machine lacks, where that is why a run raised, and not the model; "" otherwise.

    That is a compiler, space in its cache, an instruction set, or, while another device is emulated, a 16-bit kernel
    that exists there. kernels: an op without a 16-bit kernel on any CPU counts too, for callers that do not judge
    whether the model runs in that format.
    """
    if lacks_kernel(error) and (kernels or (active() is not None and not _ON_NO_DEVICE.search(message_of(error)))):
        return brief(error)
    # Of 16 bits, cuFFT computes transforms whose lengths are powers of two.
    fft = isinstance(error, RuntimeError) and message_of(error).startswith(
        ("Unsupported dtype Half", "MKL FFT doesn't")
    )
    return brief(error) if fft and active() is not None else machine_error(error)


def lacks_kernel(error: BaseException) -> bool:
    """Whether an op was refused because the CPU has no kernel for float16 or bfloat16."""
    return isinstance(error, RuntimeError) and _NO_KERNEL.search(message_of(error)) is not None


class MissingKernels(DispatchMode):
    """Where the CPU has no 16-bit kernel, run the op in float32 and round its results, as the other device's would.

    `ran` counts these runs by op. Ops that write into their arguments raise as they do without.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable or not lacks_kernel(error):
                raise
            name = func._schema.name
            if _ON_NO_DEVICE.search(name):
                raise
        low = next((t.dtype for _, t in tensors((args, kwargs)) if is_16_bit(t)), torch.float16)
        args, kwargs = map_tensors(float32_of_16_bit, (args, kwargs))
        kwargs = {key: torch.float32 if value is low else value for key, value in kwargs.items()}
        out = func(*args, **kwargs)
        self.ran[name] += 1
        return map_tensors(lambda t: t.to(low) if t.dtype is torch.float32 else t, out)
