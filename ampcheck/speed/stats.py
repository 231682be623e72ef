"""Plain data of a speed measurement: seconds of each block, paired ratios, and the record that is stored."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from statistics import median
from typing import cast

from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.json_files import from_plain
from ampcheck.core.run import Scalar
from ampcheck.speed.threads import Threads

VERSIONS = (
    "platform",
    "torch",
    "python",
    "CUDA",
    "triton",
    "float32 matmul precision",
    "TF32 in matmul",
    "TF32 in cuDNN",
)
KEYED = ("device", "threads", *VERSIONS)
"""The parts of the environment on which a time depends, besides the measured code."""


def fingerprint(device: str = "cpu") -> dict[str, Scalar]:
    """The hardware and the versions of this process. Imports torch."""
    known = environment(device)
    return {name: known[name] for name in KEYED if name in known}


def hardware_of(known: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The part of a fingerprint that never changes within a series of the history.

    Of the platform this is the system alone: runners change the kernel's release every week.
    """
    system = str(known.get("platform") or "").partition("-")[0]
    return {"device": known.get("device"), "system": system, "threads": known.get("threads")}


def differences(before: Mapping[str, Scalar], after: Mapping[str, Scalar]) -> list[str]:
    """The differences of two fingerprints, a clause each; empty where timings are comparable."""
    return [f"{name}: {old} and {new}" for name, old, new in changes_between(before, after)]


def changes_between(
    before: Mapping[str, Scalar], after: Mapping[str, Scalar], names: Iterable[str] = KEYED
) -> list[tuple[str, Scalar, Scalar]]:
    """The parts of two fingerprints that differ, with the old and the new value."""
    pairs = ((name, before.get(name, "unknown"), after.get(name, "unknown")) for name in names)
    return [(name, old, new) for name, old, new in pairs if old != new]


def key_of(known: Mapping[str, Scalar], precision: str = "float32") -> str:
    """Twelve hex digits of hardware, versions and precision: equal where timings may be compared."""
    return _digest({name: known.get(name) for name in KEYED}, precision)


def hardware_key(known: Mapping[str, Scalar], precision: str = "float32") -> str:
    """The same of the hardware alone, which keeps a series together across releases of torch."""
    return _digest(hardware_of(known), precision)


def _digest(parts: Mapping[str, Scalar], precision: str) -> str:
    text = json.dumps([*([name, value] for name, value in parts.items()), precision])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


SCHEMA = 1
"""Version of a `SpeedRecord` as data. 1: the first."""

TWIN = "A/A twin"
"""The arm that runs the reference again: its difference from the reference is noise."""

LOOKS = (0.125, 0.25, 0.5, 1.0)
"""Shares of the budget after which the verdict is computed. Each look costs confidence."""


@dataclass(frozen=True, slots=True)
class ArmTimes:
    """One arm: the reference, its twin, or an arm that is compared with it.

    seconds: of one call, one value for each cycle, in the order of the cycles; the cycles of all arms correspond. Of an
    arm it is the geometric mean of its two blocks; of the twin it is the time that an arm of equal speed would show:
    the reference's time and the ratio of its two blocks, to the power of the root of 1/2, as a mean of two varies less.
    calls: how many calls a block has; `seconds` is the block's time divided by it. first: seconds of the first call of
    all, compilation included.
    """

    name: str
    seconds: tuple[float, ...]
    calls: int = 1
    first: float = 0.0

    @property
    def median(self) -> float:
        """Seconds of the typical call."""
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class SpeedStats:
    """Arms that ran in turn, block by block, in one process.

    arms: the first is the reference, the second its A/A twin. fingerprint: of hardware and versions. conditions: load
    and clock rates of the machine during the measurement. spent: seconds in the cycles. stopped: why it ended:
    `narrow`, `decided` or `budget`. threads: of all arms; None where a device
    computes.
    """

    subject: str
    arms: tuple[ArmTimes, ...]
    fingerprint: Mapping[str, Scalar] = field(default_factory=dict)
    conditions: Mapping[str, Scalar] = field(default_factory=dict)
    spent: float = 0.0
    stopped: str = "budget"
    threads: Threads | None = None

    @property
    def reference(self) -> ArmTimes:
        """The arm that all others are compared with."""
        return self.arms[0]

    @property
    def twin(self) -> ArmTimes:
        """The reference once more."""
        return self.arms[1]

    @property
    def compared(self) -> tuple[ArmTimes, ...]:
        """The arms except the reference and its twin."""
        return self.arms[2:]

    def arm(self, name: str) -> ArmTimes:
        """The arm of this name. Raises `UsageError` where there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise UsageError(f"{self.subject} has no arm {name!r}; there are {', '.join(arm.name for arm in self.arms)}")

    @property
    def cycles(self) -> int:
        """How many paired blocks there are."""
        return len(self.reference.seconds)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster than the reference: the median of the paired ratios, reference seconds / arm seconds.

    Above 1 the arm is faster. low, high: its interval at `confidence`. p05, minimum: of the ratios themselves.
    """

    median: float
    low: float
    high: float
    confidence: float = 0.95
    p05: float = 0.0
    minimum: float = 0.0
    cycles: int = 0

    @property
    def width(self) -> float:
        """Half of the interval, as a share of the ratio."""
        return (self.high - self.low) / (2 * self.median)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True)
class SpeedRecord:
    """One comparison in its stored form: in pytest-benchmark's `extra_info`, in the history, in evidence.

    name: the benchmark or target. ratio, low, high: as in `Ratio`, at `confidence`. noise: how far the A/A twin's
    ratio is from 1, at the far end of its interval, as a share. reference_seconds, arm_seconds: of the typical call,
    for charts and never for a verdict. verdict: of `ampcheck.Verdict`, "" where nothing was judged.
    """

    name: str
    reference: str
    arm: str
    ratio: float
    low: float
    high: float
    p05: float
    minimum: float
    noise: float
    cycles: int
    confidence: float = 0.95
    precision: str = "float32"
    reference_seconds: float = 0.0
    arm_seconds: float = 0.0
    verdict: str = ""
    fingerprint: Mapping[str, Scalar] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """This record as data for `json.dumps`; an infinite bound, of too few cycles, becomes null."""
        plain = {known.name: getattr(self, known.name) for known in fields(self)}
        plain |= {name: None for name in ("high", "noise") if plain[name] == math.inf}
        return {"schema": SCHEMA, **plain, "fingerprint": dict(self.fingerprint)}

    @classmethod
    def from_dict(cls, data: object) -> SpeedRecord:
        """The inverse of `to_dict`. Raises `UsageError` for a newer schema or damaged data."""
        require_schema(data, "this", "speed record of ampcheck", SCHEMA)
        stored = cast("Mapping[str, object]", data)
        values = {known.name: stored[known.name] for known in fields(cls) if known.name in stored}
        values |= {name: math.inf for name in ("high", "noise") if values.get(name, 0) is None}
        try:
            return from_plain(cls, values)
        except (TypeError, ValueError) as error:
            raise UsageError(f"this speed record of ampcheck is damaged: {error}") from error
