"""In which 16-bit format a model keeps its weights."""

from __future__ import annotations

from collections import Counter

import torch
from torch.nn.parameter import is_lazy

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
