"""Where a subject runs: on a device, or on the CPU under that device's autocast policy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.autocast.cuda_stand_in import is_here
from ampcheck.autocast.emulate import emulate
from ampcheck.autocast.gpus import gpu_of
from ampcheck.autocast.placement import is_open
from ampcheck.autocast.state import KEYS, registered
from ampcheck.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Placement:
    """`device` holds the tensors; `emulated` is the type of another device whose autocast policy they follow, `gpu` the
    name of a GPU of that type."""

    device: str
    emulated: str = ""
    gpu: str = ""

    def entered(self) -> AbstractContextManager[Any]:
        """The emulation to run under, or nothing."""
        return emulate(f"{self.emulated}:{self.gpu}".rstrip(":")) if self.emulated else nullcontext()

    def __str__(self) -> str:
        return f"{self.emulated} emulated on {self.device}" if self.emulated else self.device


def place(device: str) -> Placement:
    """The placement of a device. Raises `UsageError` for one that can be neither used nor emulated."""
    gpu = "" if is_present("cuda") else gpu_of(device)
    try:
        kind = torch.device("cuda" if gpu else device).type
    except RuntimeError as error:
        raise UsageError(
            f"{device!r} is no device; there are {', '.join(KEYS)}, with an index such as cuda:0"
        ) from error
    if kind == "meta":
        raise UsageError("device 'meta' holds no values to judge: use --device cpu")
    if kind != "cpu" and kind in KEYS and not is_present(kind) and registered(kind):
        return Placement("cpu", kind, gpu)
    try:
        torch.empty(1, device=device)
    except Exception as error:  # each backend has an exception of its own for a device that is not there
        raise UsageError(f"device {device!r} is not there: {str(error).splitlines()[0]}") from error
    return Placement(device)


def is_present(kind: str) -> bool:
    """Return whether this machine has a device of a type."""
    return not is_open(kind) and is_here(kind)
