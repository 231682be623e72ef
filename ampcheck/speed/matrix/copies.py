"""How often a matrix copies a model: each arm has one of its own, and all stay until the last is timed."""

from __future__ import annotations

import torch

from ampcheck.core.errors import UsageError, as_result
from ampcheck.speed.matrix.workloads import Workload
from ampcheck.speed.memory import available_memory
from ampcheck.torchtools.copying import modules_of


def require_room(workload: Workload, *, device: str, size: str, arms: int) -> None:
    """Raise `UsageError` where the copies of a workload's model cannot all lie on the device; told before any is made.

    What is counted is parameters and buffers; activations, gradients and the state of an optimizer come to that.
    """
    one, free = copy_bytes(workload, size), available_memory(device)
    if free is None or arms * one <= free:
        return
    raise UsageError(
        f"each arm of a matrix has a copy of the model, and all must lie on {device} at once; {arms} copies of "
        f"{workload.name} need {_gib(arms * one)}, and {_gib(free)} are available: ask for fewer at a time with --mode "
        "and --precision (modes and precisions of measure_matrix)"
    )


def copy_bytes(workload: Workload, size: str) -> int:
    """Bytes of the parameters and buffers of one copy, what is shared counted once; 0 where there is no model."""
    try:
        modules = modules_of(workload.subject(size).model)
    except UsageError:
        raise
    except BaseException as error:  # noqa: BLE001  # the workload's own: its cells tell it
        as_result(error)
        return 0
    tensors: dict[int, torch.Tensor] = {}
    for module in modules:
        tensors |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
