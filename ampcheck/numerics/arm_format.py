"""In which format an arm computes, and what findings call it."""

from __future__ import annotations

from collections import Counter

import torch
from torch.nn.parameter import is_lazy

from ampcheck.autocast.emulate import active
from ampcheck.core.formats import format_of
from ampcheck.core.subject import Subject
from ampcheck.numerics.record import arguments
from ampcheck.torchtools.copying import modules_of


def native_format(subject: Subject) -> torch.dtype | None:
    """The 16-bit dtype in which the model keeps its weights; None where autocast makes the 16 bits.

    Such a model runs without autocast, which would change what its author wrote. Most of the elements of the floating
    parameters decide (a float32 model may keep a table in 16 bits); without parameters, any buffer or input does.
    """
    modules = modules_of(subject.model)
    sizes: Counter[torch.dtype] = Counter()
    for module in modules:
        for parameter in module.parameters():
            if parameter.is_floating_point() and not is_lazy(parameter):
                sizes[parameter.dtype] += parameter.numel()
    if sizes:
        dtype = sizes.most_common(1)[0][0]
        return dtype if dtype.itemsize == 2 else None
    data = [buffer for module in modules for buffer in module.buffers()]
    data += [tensor for _, tensor in arguments(subject.calls)]
    return next((t.dtype for t in data if t.is_floating_point() and t.dtype.itemsize == 2), None)


def arm_name(dtype: torch.dtype, native: bool, *, compiled: bool) -> str:
    """`float16, eager` under autocast; `float16 native, compiled` for a model that is kept in 16 bits.

    Under an emulation it says so: `float16, eager, cuda emulated`.
    """
    return f"{format_of(dtype).name}{' native' if native else ''}, {'compiled' if compiled else 'eager'}{on_device()}"


def on_device() -> str:
    """What the name of an arm ends with under an emulation: `, cuda emulated`."""
    emulation = active()
    return f", {emulation.policy.device} emulated" if emulation is not None else ""
