"""How long a block of calls takes on a device: one synchronisation a block, and caches alike before each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Scalar


class Clock(Protocol):
    """What a measurement needs of a device."""

    kind: str
    """`wall`, or `device` where events of the device are read."""

    def prepare(self, call: Callable[[], object] | None) -> None:
        """Bring the caches into the state in which a block begins, whatever ran before it.

        call: the arm's, where it is so short that the state matters.
        """

    def block(self, call: Callable[[], object], calls: int) -> float:
        """Seconds that `calls` calls in a row take, until the device has finished them."""

    def conditions(self) -> dict[str, float]:
        """What the machine does now that a time depends on: its load, its clock."""


class WallClock:
    """The clock of the CPU; of other devices too, which are synchronised once a block."""

    kind = "wall"

    def __init__(self, synchronise: Callable[[], None] | None = None) -> None:
        self._synchronise = synchronise

    def prepare(self, call: Callable[[], object] | None) -> None:
        """Call once, untimed, so that the arm's own data are in the cache, as when it runs alone."""
        if call is None:
            return
        call()
        if self._synchronise is not None:
            self._synchronise()

    def block(self, call: Callable[[], object], calls: int) -> float:
        """Seconds that `calls` calls in a row take."""
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if self._synchronise is not None:
            self._synchronise()
        return time.perf_counter() - begin

    def conditions(self) -> dict[str, float]:
        """Processes that want to run, and MHz of the first core where Linux tells it."""
        found = {"load": os.getloadavg()[0]} if hasattr(os, "getloadavg") else {}
        try:
            with open("/proc/cpuinfo", encoding="utf-8") as lines:
                found["MHz"] = next(float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz"))
        except (OSError, ValueError, StopIteration):
            pass
        return found


class CudaClock:
    """Events on the current stream of its device; each block finds the L2 cache cold."""

    kind = "device"

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._device = torch, torch.device(device)
        size = getattr(torch.cuda.get_device_properties(self._device), "L2_cache_size", 0) or 64 * 2**20
        self._flush = torch.empty(2 * size, dtype=torch.int8, device=self._device)

    def prepare(self, call: Callable[[], object] | None) -> None:
        """Overwrite the L2 cache."""
        with self._torch.cuda.device(self._device):
            self._flush.zero_()

    def block(self, call: Callable[[], object], calls: int) -> float:
        """Seconds between an event before the first call and one behind the last."""
        cuda = self._torch.cuda
        with cuda.device(self._device):  # an event is recorded on the current device's stream
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def conditions(self) -> dict[str, float]:
        """MHz of the multiprocessors and degrees Celsius, where NVML can be asked."""
        found: dict[str, float] = {}
        for name, read in (("MHz", self._torch.cuda.clock_rate), ("degrees", self._torch.cuda.temperature)):
            try:
                found[name] = float(read(self._device))
            except Exception:  # noqa: BLE001, PERF203  # NVML is optional, and each of its parts may be missing or forbidden
                continue
        return found


def clock_of(device: str) -> Clock:
    """The clock of a device. Raises `UsageError` for one that is not there: speed cannot be emulated."""
    import torch

    if device.partition(":")[0] == "meta":
        raise UsageError("device 'meta' computes nothing that could be timed: use --device cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except Exception as error:  # each backend has an exception of its own for a device that is not there
        raise UsageError(
            f"speed is measured on the device itself and {device!r} is not there "
            f"({str(error).splitlines()[0]}): use --device cpu"
        ) from error
    if place.type == "cuda":
        return CudaClock(device)
    if place.type == "cpu":
        return WallClock()
    backend: Any = getattr(torch, place.type)
    return WallClock(partial(backend.synchronize, place) if place.index is not None else backend.synchronize)


def summarised(seen: list[dict[str, float]]) -> dict[str, Scalar]:
    """The lowest and the highest of what `conditions` told at several times."""
    names = dict.fromkeys(name for one in seen for name in one)
    told: dict[str, Scalar] = {}
    for name in names:
        values = [one[name] for one in seen if name in one]
        told[f"{name}, lowest"], told[f"{name}, highest"] = min(values), max(values)
    return told
