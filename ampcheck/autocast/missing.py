"""Missing kernels of this machine: why a run raised, and a substitute for missing 16-bit kernels.

The substitute is for ops without a 16-bit kernel on the CPU while another device is emulated that has one.
"""

from __future__ import annotations

import os
import re
import traceback
from collections import Counter
from typing import Any

import torch

from ampcheck.autocast.emulate import active
from ampcheck.autocast.kernels import float32_of_16_bit, is_16_bit
from ampcheck.checks.always.coverage import CHECK as COVERAGE
from ampcheck.core.errors import brief, message_of
from ampcheck.core.run import Finding, Where
from ampcheck.stream.ops import OpEvent, OpSubscriber
from ampcheck.torchtools.pytree import map_tensors
from ampcheck.torchtools.source import is_users, short_path, users_place
from ampcheck.torchtools.unsupported import machine_error

_NO_KERNEL = re.compile("not (implemented|supported) for '?(Half|BFloat16)")

_ON_NO_DEVICE = re.compile("linalg|cholesky|svd|(?<!w)eig|(?<!s)qr|(?<![a-z])lu(?![a-z])|lstsq|triangular|ldl")
"""Linear algebra in 16 bits exists on no device: cuSOLVER and MAGMA are called for float32 and wider alone. Weights,
square roots and `relu_` do not match."""


def lacking(error: BaseException, *, kernels: bool = False) -> str:
    """Return what this machine lacks, where that is why a run raised, and not the model; "" otherwise.

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
    """Return whether an op was refused because the CPU has no kernel for float16 or bfloat16."""
    return isinstance(error, RuntimeError) and _NO_KERNEL.search(message_of(error)) is not None


class MissingKernels(OpSubscriber):
    """Where the CPU has no 16-bit kernel, run the op in float32 and round its results, as the other device's would.

    `ran` counts these runs by op. Ops that write into their arguments raise as they do without.
    """

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()

    def see(self, event: OpEvent) -> Any:
        """Run an op, which nobody who subscribed before sees where it runs in float32."""
        try:
            return event.run()
        except RuntimeError as error:
            if event.higher or event.op._schema.is_mutable or not lacks_kernel(error):
                raise
            name = event.op._schema.name
            if _ON_NO_DEVICE.search(name):
                raise
        low = next((t.dtype for t in event.tensors if is_16_bit(t)), torch.float16)
        args, kwargs = map_tensors(float32_of_16_bit, (event.args, event.kwargs))
        kwargs = {key: torch.float32 if value is low else value for key, value in kwargs.items()}
        out = event.op(*args, **kwargs)
        self.ran[name] += 1
        return map_tensors(lambda t: t.to(low) if t.dtype is torch.float32 else t, out)


_CUDA_ALONE = (
    r"No module named '(flash_attn\w*|bitsandbytes|apex|xformers|transformer_engine|triton|deepspeed|cupy|pycuda)\b",
    r"No module named '(amp_C|mamba_ssm|causal_conv1d|pynvml)\b",
    r"Could not run '([\w:.]+)' with arguments from the '(?:CPU|CUDA)' backend",
    r"(?s)(FlashAttention\w*|flash[_-]attn|bitsandbytes)\b.*(?:install|CUDA|GPU)",
    r"(libcuda|active drivers|CUDA_HOME|nvcc|NVIDIA driver|Torch not compiled with CUDA|dummy base class)",
    r"has no attribute '(_cuda_\w+)'",
    r"(requires CUDA|support for cuda devices|CUDA error|No (?:viable backend|available kernel))",
)
"""Messages of what exists on CUDA alone, with its name: packages, kernels, drivers and compilers."""

NEEDS_CUDA = (
    "let the code take its way without CUDA's own kernels, such as attn_implementation='sdpa', or audit it on a GPU"
)


def not_imitated(message: str) -> str:
    """Return what the emulation of CUDA on a CPU cannot imitate, where an exception with this message says that; else
    "".

    That is a kernel of CUDA: the code's own, one of a package, or one that Triton would launch.
    """
    return next((found[1] for pattern in _CUDA_ALONE if (found := re.search(pattern, message)) is not None), "")


def unimitated(error: BaseException, subject: str) -> Finding | None:
    """The finding about code that raised since it needs CUDA itself, at its line; None where that is not why."""
    name = not_imitated(message_of(error)) if isinstance(error, Exception) else ""
    if not name:
        return None
    text = brief(error).partition(". ")[0]
    message = f"not judged from here on: it needs CUDA itself ({name}), which a CPU cannot imitate: {text}"
    return COVERAGE.incomplete(subject, message, where=Where("", "", "", *_place(error)), hint=NEEDS_CUDA)


def _place(error: BaseException) -> tuple[str, int | None]:
    """The innermost line of the code that is no installed package, such as Triton; of one where there is no other."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if is_users(file) and f"{os.sep}site-packages{os.sep}" not in file]
    return (short_path(own[-1][0]), own[-1][1]) if own else users_place(error)
