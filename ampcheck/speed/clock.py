"""Times a block of calls on a device: one synchronisation per block, the same cache state before each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ampcheck.core.errors import UsageError
from ampcheck.core.run import Scalar

if TYPE_CHECKING:
    from torch.cuda import Event


class Effort(NamedTuple):
    """CPU seconds of all threads of this process so far, and how often the system took a core away from one of them."""

    cpu: float
    switches: int


class Clock(Protocol):
    """The interface of a device to a measurement."""

    def prepare(self, call: Callable[[], object] | None) -> None:
        """Bring the caches into the state in which every block begins.

        call: the arm's, where it is so short that the state matters.
        """

    def block(self, call: Callable[[], object], calls: int) -> float:
        """Seconds that `calls` calls in a row take, until the device has finished them."""

    def conditions(self) -> dict[str, float]:
        """The present load and clock rates of the machine."""

    def effort(self) -> Effort | None:
        """The use of the CPU so far; None where it is not known, or a device computes instead."""


class WallClock:
    """The clock of the CPU; of other devices too, which are synchronised once per block."""

    def __init__(self, synchronise: Callable[[], object] | None = None) -> None:
        self._synchronise, self._on_cpu = synchronise or (lambda: None), synchronise is None

    def prepare(self, call: Callable[[], object] | None) -> None:
        """Call once, untimed, so that the arm's own data are in the cache, as when it runs alone."""
        if call is not None:
            call()
            self._synchronise()

    def block(self, call: Callable[[], object], calls: int) -> float:
        """Seconds that `calls` calls in a row take."""
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        self._synchronise()
        return time.perf_counter() - begin

    def conditions(self) -> dict[str, float]:
        """Processes that are ready to run, and MHz of the first core where Linux reports it."""
        conditions = {"load": os.getloadavg()[0]} if hasattr(os, "getloadavg") else {}
        with suppress(OSError, ValueError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
            conditions["MHz"] = next(float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz"))
        return conditions

    def effort(self) -> Effort | None:
        """From the system's account of this process."""
        if not self._on_cpu:
            return None
        try:
            from resource import RUSAGE_SELF, getrusage
        except ImportError:  # Windows
            return None
        usage = getrusage(RUSAGE_SELF)
        return Effort(usage.ru_utime + usage.ru_stime, usage.ru_nivcsw)


class CudaClock:
    """Events on the current stream of its device; each block begins with a cold L2 cache."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda, self._device = torch.cuda, torch.device(device)
        size = getattr(torch.cuda.get_device_properties(self._device), "L2_cache_size", 0) or 64 * 2**20
        self._flush = torch.empty(2 * size, dtype=torch.int8, device=self._device)

    def prepare(self, call: Callable[[], object] | None) -> None:
        """Overwrite the L2 cache."""
        with self._cuda.device(self._device):
            self._flush.zero_()

    def block(self, call: Callable[[], object], calls: int) -> float:
        """Seconds between an event before the first call and one after the last."""
        with self._cuda.device(self._device):  # an event is recorded on the current device's stream
            event: Callable[..., Event] = self._cuda.Event
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def conditions(self) -> dict[str, float]:
        """MHz of the multiprocessors and degrees Celsius, where NVML reports them."""
        conditions: dict[str, float] = {}
        for name, read in (("MHz", self._cuda.clock_rate), ("degrees", self._cuda.temperature)):
            with suppress(Exception):  # NVML is optional, and each of its parts may be missing or forbidden
                conditions[name] = float(read(self._device))
        return conditions

    def effort(self) -> Effort | None:
        """None: the device computes."""
        return None


def clock_of(device: str) -> Clock:
    """The clock of a device. Raises `UsageError` for one that is not there: speed cannot be emulated."""
    import torch

    if device.partition(":")[0] == "meta":
        raise UsageError("device 'meta' computes nothing that could be timed: use --device cpu")
    try:
        known = torch.device(device)
        torch.empty(1, device=known)
    except Exception as error:  # each backend has an exception of its own for a device that is not there
        raise UsageError(
            f"speed is measured on the device itself and {device!r} is not there "
            f"({str(error).splitlines()[0]}): use --device cpu"
        ) from error
    if known.type == "cuda":
        return CudaClock(device)
    if known.type == "cpu":
        return WallClock()
    synchronise: Callable[..., object] = getattr(torch, known.type).synchronize
    return WallClock(synchronise if known.index is None else partial(synchronise, known))


def summarised(conditions: list[dict[str, float]]) -> dict[str, Scalar]:
    """The lowest and the highest value of each condition over several moments."""
    summary: dict[str, Scalar] = {}
    for name in dict.fromkeys(name for moment in conditions for name in moment):
        values = [moment[name] for moment in conditions if name in moment]
        summary[f"{name}, lowest"], summary[f"{name}, highest"] = min(values), max(values)
    return summary
