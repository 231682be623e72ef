"""What this machine lacks: the one question of every part whose run raised, and a stand-in for missing 16-bit kernels.

The stand-in is for ops for which the CPU has no 16-bit kernel while another device is emulated that has one.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampcheck.autocast.emulate import active
from ampcheck.core.errors import brief, message_of
from ampcheck.torchtools.pytree import map_tensors
from ampcheck.torchtools.unsupported import machine_error

_LACKING = re.compile("not (implemented|supported) for '?(Half|BFloat16)")


_NOWHERE = re.compile("linalg|cholesky|svd|(?<!w)eig|(?<!s)qr|(?<![a-z])lu(?![a-z])|lstsq|triangular|ldl")
"""Linear algebra in 16 bits exists on no device: cuSOLVER and MAGMA are called for float32 and wider alone. Weights,
square roots and `relu_` are none of it."""


def lacking(error: BaseException, *, kernels: bool = False) -> str:
    """What this machine lacks, where that is why a run raised, and not the model; "" otherwise.

    That is a compiler, space in its cache, an instruction set, or, while another device is emulated, a 16-bit kernel
    that exists there. kernels: an op without a 16-bit kernel on any CPU counts too, for parts that judge something else
    than whether the model runs in that format.
    """
    if lacks_kernel(error) and (kernels or (active() is not None and not _NOWHERE.search(message_of(error)))):
        return brief(error)
    if active() is not None and lacks_fft(error):
        return brief(error)
    return machine_error(error)


def lacks_kernel(error: BaseException) -> bool:
    """Whether an op was refused because the CPU has no kernel for float16 or bfloat16."""
    return isinstance(error, RuntimeError) and _LACKING.search(message_of(error)) is not None


def lacks_fft(error: BaseException) -> bool:
    """Whether a Fourier transform of 16 bits was refused, which cuFFT computes where lengths are powers of two."""
    refusals = ("Unsupported dtype Half", "MKL FFT doesn't")
    return isinstance(error, RuntimeError) and message_of(error).startswith(refusals)


class MissingKernels(TorchDispatchMode):
    """Where the CPU has no 16-bit kernel, run the op in float32 and round its results, as the other device's would.

    `ran` counts by op how often that was done. Ops that write into their arguments raise as they do without.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if func._schema.is_mutable or not lacks_kernel(error) or _NOWHERE.search(func._schema.name):
                raise
        narrow = _narrow((args, kwargs))
        wide_args, wide_kwargs = map_tensors(_widened, (args, kwargs))
        wide_kwargs = {key: torch.float32 if value is narrow else value for key, value in wide_kwargs.items()}
        out = func(*wide_args, **wide_kwargs)
        name = func._schema.name
        self.ran[name] = self.ran.get(name, 0) + 1
        return map_tensors(lambda t: t.to(narrow) if t.dtype is torch.float32 else t, out)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 2 else tensor


def _narrow(given: Any) -> torch.dtype:
    """The 16-bit dtype among the arguments."""
    found: list[torch.dtype] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dtype.itemsize == 2:
            found.append(tensor.dtype)
        return tensor

    map_tensors(look, given)
    return found[0] if found else torch.float16
