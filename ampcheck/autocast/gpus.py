"""The GPUs that a device of the command line may name: `cuda:a100`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ampcheck.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU: its name, compute capability, bytes of memory and multiprocessors."""

    name: str
    capability: tuple[int, int]
    memory: int
    processors: int


GPUS = {
    "a100": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 85_097_971_712, 108),
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 85_017_624_576, 132),
    "3070": GPU("NVIDIA GeForce RTX 3070", (8, 6), 8_359_313_408, 46),
    "t4": GPU("Tesla T4", (7, 5), 15_642_329_088, 40),
    "v100": GPU("Tesla V100-SXM2-16GB", (7, 0), 16_935_682_048, 80),
}
"""The GPUs that `cuda:NAME` names. Capability and multiprocessors are those of the model; memory is nominal: what a
driver reports of it differs by a percent."""

THREADS = {(7, 5): 1024, (8, 6): 1536}
"""Resident threads of a multiprocessor where they are not 2048 (CUDA C++ Programming Guide, table of compute
capabilities)."""


def gpu_of(device: str | torch.device) -> str:
    """The name of a GPU in `cuda:NAME`, "" for an index or none. Raises `UsageError` for a name that is unknown."""
    kind, _, name = str(device).partition(":")
    if kind != "cuda" or (name not in GPUS and (not name or name.isdecimal())):
        return ""
    if name not in GPUS:
        raise UsageError(f"device {str(device)!r} names no GPU that is known here: {', '.join(GPUS)}")
    return name
