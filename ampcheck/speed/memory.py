"""How much memory one step needs beyond what is held when it begins: tensors, not pages.

On the CPU PyTorch's allocator tells its profiler of every block, those of compiled code included; the highest sum is
the same from run to run. The resident set is not read: after a first call it says nothing, since the C library keeps
freed pages (a step that needs 32 MiB shows 0). What kernels keep in registers, on the stack or in a library's scratch
space is no tensor and not counted, nor is what other threads than the calling one allocate.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROBE = 12_345_664
"""Bytes of a tensor made first, by which one sees whether the allocator tells; a multiple of 64, as it rounds to."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the highest point of one step. None where they cannot be told, with the reason; how: who told them."""

    bytes: int | None
    how: str = ""
    reason: str = ""


def peak_memory(step: Callable[[], object], *, device: str = "cpu", held: int | None = None) -> Peak:
    """Run `step`, after its warm-up, and tell its peak. Imports torch.

    On the CPU it runs twice: the allocator tells that a block is freed only if it told that it was made, and a step may
    free what the one before it left. Not to be called under another profiler, which would be ended.

    held: bytes on an accelerator to count from, of `held_memory`; None: what is held when the step begins. What a step
    keeps between calls, such as the pool of CUDA graphs, is counted only from an earlier `held`; what a graph computes
    in its pool is free to the allocator, and taken nonetheless. The CPU counts from the beginning of the step.
    """
    import torch

    kind = torch.device(device).type
    if kind == "cpu":
        return _on_cpu(step)
    backend: Any = getattr(torch, kind, None)
    if not all(hasattr(backend, name) for name in ("reset_peak_memory_stats", "max_memory_allocated")):
        return Peak(None, reason=f"PyTorch does not tell the peak memory of {kind}")
    before = held_memory(device) if held is None else held
    backend.synchronize(device)
    backend.reset_peak_memory_stats(device)
    step()
    backend.synchronize(device)
    most = int(backend.max_memory_allocated(device)) + _idle_pools(backend, device)
    return Peak(most - before, f"torch.{kind}.max_memory_allocated")


def held_memory(device: str) -> int:
    """Bytes of tensors on an accelerator now, and what is free in pools of CUDA graphs; 0 where it does not tell."""
    import torch

    backend: Any = getattr(torch, torch.device(device).type, None)
    told: Any = getattr(backend, "memory_allocated", None)
    return int(told(device)) + _idle_pools(backend, device) if told is not None else 0


def available_memory(device: str) -> int | None:
    """Bytes that new tensors may take on a device; None where neither it nor the system tells."""
    import torch

    kind = torch.device(device).type
    if kind == "cpu":
        return _of_system()
    backend: Any = getattr(torch, kind, None)
    if not hasattr(backend, "mem_get_info"):
        return None
    kept = int(backend.memory_reserved(device)) - int(backend.memory_allocated(device))
    return int(backend.mem_get_info(device)[0]) + kept


def _of_system(table: Path = Path("/proc/meminfo")) -> int | None:
    """What Linux can give without swapping."""
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _idle_pools(backend: Any, device: str) -> int:
    """Bytes that the pools of CUDA graphs hold and no tensor has: a replay writes there, and tells no allocator."""
    import torch

    told: Any = getattr(backend, "memory_snapshot", None)
    if torch.device(device).type != "cuda" or told is None:
        return 0
    index = torch.device(device).index
    number = backend.current_device() if index is None else index
    pools = [one for one in told() if one.get("device", number) == number and tuple(one["segment_pool_id"]) != (0, 0)]
    return sum(int(one["total_size"]) - int(one["allocated_size"]) for one in pools)


def _on_cpu(step: Callable[[], object]) -> Peak:
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        failed: BaseException | None = None
        with _quietly(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            torch.empty(_PROBE, dtype=torch.uint8)
            try:
                step()
            except BaseException as error:  # noqa: BLE001  # the user's; the profiler is ended first
                failed = error
        if failed is not None:
            raise failed
    with tempfile.TemporaryDirectory(prefix="ampcheck-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    told = [event for event in events if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0]
    told.sort(key=lambda event: float(event["ts"]))
    changes = [int(event["args"]["Bytes"]) for event in told]
    if changes[:2] != [_PROBE, -_PROBE]:
        return Peak(None, reason="PyTorch's CPU allocator does not tell its profiler what it allocates")
    return Peak(_highest(changes[2:]), "torch.profiler")


def _highest(changes: list[int]) -> int:
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most


@contextmanager
def _quietly() -> Iterator[None]:
    """The profiler's library writes two lines to standard error for each use, unless it is told otherwise at first."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        os.environ.pop(name, None)
