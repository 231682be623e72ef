"""Peak memory of one step beyond that at its beginning: tensors, not pages.

On the CPU PyTorch's allocator reports every block to its profiler, those of compiled code included; the highest sum is
the same from run to run. The resident set is not read: the C library keeps freed pages (a step that needs 32 MiB shows
0 after a first call). Registers, stacks, scratch space of libraries and allocations of other threads are not counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ampcheck.core.environment import variables

_PROBE = 12_345_664
"""Bytes of a first tensor, which shows whether the allocator reports; a multiple of 64, to which it rounds."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the highest point of one step; None with the reason."""

    bytes: int | None
    reason: str = ""


def peak_memory(step: Callable[[], object], *, device: str = "cpu", before: int | None = None) -> Peak:
    """Run `step`, after its warm-up, and return its peak. Imports torch.

    On the CPU it runs twice: a block that is freed is reported only if its allocation was, and a step may free blocks
    of the one before it. Must not be called under another profiler, which would be ended.

    before: bytes on an accelerator to count from, of `allocated_memory`; None: those at the beginning of the step.
    Memory that a step keeps between calls, such as the pool of CUDA graphs, counts only from an earlier `before`.
    """
    import torch

    kind = torch.device(device).type
    if kind == "cpu":
        return _on_cpu(step)
    backend: Any = getattr(torch, kind, None)
    if not all(hasattr(backend, name) for name in ("reset_peak_memory_stats", "max_memory_allocated")):
        return Peak(None, reason=f"PyTorch does not report the peak memory of {kind}")
    start = allocated_memory(device) if before is None else before
    backend.synchronize(device)
    backend.reset_peak_memory_stats(device)
    step()
    backend.synchronize(device)
    most = int(backend.max_memory_allocated(device)) + _idle_pools(backend, device)
    return Peak(most - start)


def allocated_memory(device: str) -> int:
    """Bytes of tensors on an accelerator now, and free ones in pools of CUDA graphs; 0 where they are not reported."""
    import torch

    backend: Any = getattr(torch, torch.device(device).type, None)
    if not hasattr(backend, "memory_allocated"):
        return 0
    return int(backend.memory_allocated(device)) + _idle_pools(backend, device)


def available_memory(device: str) -> int | None:
    """Bytes that new tensors may take on a device; None where they are not known."""
    import torch

    kind = torch.device(device).type
    if kind == "cpu":
        return _of_system()
    backend: Any = getattr(torch, kind, None)
    if not hasattr(backend, "mem_get_info"):
        return None
    cached = int(backend.memory_reserved(device)) - int(backend.memory_allocated(device))
    return int(backend.mem_get_info(device)[0]) + cached


def _of_system(table: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that Linux can provide without swapping."""
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _idle_pools(backend: Any, device: str) -> int:
    """Bytes in the pools of CUDA graphs without a tensor: a replay computes there, unknown to the allocator."""
    import torch

    if torch.device(device).type != "cuda" or not hasattr(backend, "memory_snapshot"):
        return 0
    index = torch.device(device).index
    number = backend.current_device() if index is None else index
    return sum(
        int(segment["total_size"]) - int(segment["allocated_size"])
        for segment in backend.memory_snapshot()
        if segment.get("device", number) == number and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def _on_cpu(step: Callable[[], object]) -> Peak:
    import torch
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    # By default the profiler's library writes two lines to standard error for each use.
    silent = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}
    for _ in range(2):
        failure: BaseException | None = None
        with variables(silent), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            torch.empty(_PROBE, dtype=torch.uint8)
            try:
                step()
            except BaseException as error:  # noqa: BLE001  # the user's; the profiler is ended first
                failure = error
        if failure is not None:
            raise failure
    events: Any = profiler.profiler.kineto_results.events()
    on_cpu = (event for event in events if event.name() == "[memory]" and event.device_type() == DeviceType.CPU)
    changes = [event.nbytes() for event in sorted(on_cpu, key=lambda event: event.start_ns())]
    if changes[:2] != [_PROBE, -_PROBE]:
        return Peak(None, reason="PyTorch's CPU allocator does not report to its profiler")
    return Peak(max(accumulate(changes[2:], initial=0)))
