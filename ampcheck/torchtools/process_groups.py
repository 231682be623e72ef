"""Process groups and pending work as collectives hold them below autograd."""

from __future__ import annotations

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


def process_rank() -> int:
    """The number of this process; 0 where no process group is set up."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
