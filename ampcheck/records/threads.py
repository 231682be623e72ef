"""The threads of a measurement, and how the machine let them run."""

from __future__ import annotations

from dataclasses import dataclass

from ampcheck.core.run import Scalar
from ampcheck.core.text import counted

IDLE = 0.1
"""Share of the CPU time of all threads that calls on free cores may leave unused."""

SWITCHES = 5.0
"""Involuntary context switches a second, from which on other processes use the cores: a step that leaves threads idle
by itself, or sleeps, has hardly any."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """CPU use of calls with `used` threads. cores: CPU seconds a second; switches: involuntary, a second; seconds: of
    the typical call."""

    used: int
    cores: float
    switches: float
    seconds: float = 0.0

    @property
    def crowded(self) -> bool:
        """True if other processes kept these threads from running."""
        return self.cores < (1 - IDLE) * self.used and self.switches >= SWITCHES

    def __str__(self) -> str:
        interrupted = f"{self.switches:.0f} involuntary context switches a second"
        return f"got {self.cores:.2g} of {counted(self.used, 'cores')}, with {interrupted}"


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of a measurement. used: as many; allowed: those of the program; gain: how many times as fast a call
    is with `used` as with `allowed`. occupancy: of the cores while arms were timed."""

    used: int
    allowed: int
    gain: float = 1.0
    occupancy: Occupancy | None = None

    @property
    def fewer(self) -> str:
        """A clause where there are fewer than the program's; else ""."""
        if self.used == self.allowed:
            return ""
        return (
            f"ran with {self.used} of {self.allowed} threads, {self.gain:.2g} times as fast as with {self.allowed}, "
            "since other processes keep the cores busy"
        )

    @property
    def crowded(self) -> str:
        """A clause where other processes kept the threads from running; else ""."""
        if self.occupancy is None or not self.occupancy.crowded:
            return ""
        return f"other processes keep the cores busy: the measurement {self.occupancy}"

    def environment(self) -> dict[str, Scalar]:
        """The same, for `Run.environment`."""
        values: dict[str, Scalar] = {"threads of the program": self.allowed} if self.used != self.allowed else {}
        if (occupancy := self.occupancy) is not None:
            values["cores that the threads got"] = round(occupancy.cores, 2)
            values["involuntary context switches a second"] = round(occupancy.switches, 1)
        return values
