"""Which inputs of a model a low-precision run rounds."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.numerics.reference import input_names
from ampcheck.torchtools.copying import Prepared
from ampcheck.torchtools.trace import OpEvent


class RoundedInputs:
    """An observer that tells which inputs of the model the run rounds to 16 bits."""

    def __init__(self, prepared: Prepared | None = None) -> None:
        self.names: set[str] = set()
        self._storages: dict[int, str] = {}
        for number, call in enumerate(prepared.calls if prepared else ()):
            for name, tensor in input_names(call, number).items():
                if tensor.dtype.itemsize <= 2:
                    self.names.add(name)
                elif tensor.layout is torch.strided and tensor.numel():
                    self._storages[tensor.untyped_storage().data_ptr()] = name

    def before(self, op: object, args: object, kwargs: object) -> None:
        """Nothing is needed before an op runs."""

    def after(self, event: OpEvent, op: Any, args: Any, kwargs: Any, out: Any, held: Any) -> None:
        """Look at casts only."""
        if event.op != "aten::_to_copy" or not out.is_floating_point() or out.dtype.itemsize > 2:
            return
        source = args[0]
        if source.layout is torch.strided and source.numel():
            name = self._storages.get(source.untyped_storage().data_ptr())
            if name is not None:
                self.names.add(name)
