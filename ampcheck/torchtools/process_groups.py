"""Process groups and pending work as collectives hold them below autograd."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from ampcheck.torchtools.pytree import tensors


def group_among(values: Any) -> Any:
    """The process group among the arguments of a collective: boxed, itself, or by its name."""
    import torch.distributed as dist

    for value in values:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, dist.ProcessGroup):
            return value
    # Private name of torch 2.4 to 2.13: a functional collective gets its group by name.
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    return resolve([value for value in values if isinstance(value, str)][-1])


def wait_for(out: object) -> None:
    """Wait until the result of a collective is complete."""
    for result in out if isinstance(out, (list, tuple)) else [out]:
        if isinstance(result, torch.ScriptObject):
            torch._C._distributed_c10d.Work.unbox(result).wait()
        else:
            for _, tensor in tensors(result):
                torch.ops._c10d_functional.wait_tensor(tensor)


def reduction_around(frame: FrameType | None) -> tuple[str, float] | None:
    """The name of the reduction that runs (`sum`), and the factor of its addends.

    Ops of `c10d` get it in a box that Python cannot open; `torch.distributed` has it in the options that it passes.
    None where no function of `torch.distributed` runs: DDP's reducer in C++, or a method of a process group.
    """
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            reduction = getattr(frame.f_locals.get("opts"), "reduceOp", None)  # local name of torch 2.4 to 2.13
            if reduction is not None:
                kind, factor = reduction.__getstate__()
                return ("sum", float(factor)) if kind.name == "PREMUL_SUM" else (kind.name.lower(), 1.0)
        frame = frame.f_back
    return None


def process_rank() -> int:
    """The number of this process; 0 where no process group is set up."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
