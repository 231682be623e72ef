"""Paired times of arms, what a history stores of them, and how they are judged. Numbers alone: no torch, no NumPy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from statistics import median
from typing import cast

from ampcheck.core.arguments import parse_integer, parse_number
from ampcheck.core.errors import UsageError, require_schema
from ampcheck.core.json_files import from_plain
from ampcheck.core.run import Scalar, Verdict
from ampcheck.records.threads import Threads

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
        """Number of paired blocks."""
        return len(self.reference.seconds)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed relative to the reference: the median of the paired ratios, reference seconds / arm seconds.

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


EFFECT = 0.03
"""The smallest change that fails, as a share: above what the layout of memory alone does to a time."""

NOISE, STRADDLES = "noise", "straddles"

FALSE_ALARMS = 0.01
"""Probability, at most, that a suite without any change fails."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The requirement on a ratio.

    limit: the least ratio. effect: the smallest shortfall that counts. comparisons: of the whole suite.
    """

    limit: float = 1.0
    effect: float = EFFECT
    comparisons: int = 1
    false_alarms: float = FALSE_ALARMS

    def __post_init__(self) -> None:
        parse_number(self.limit, "at_least")
        parse_number(self.effect, "effect", below=1)
        parse_integer(self.comparisons, "comparisons")
        parse_number(self.false_alarms, "false_alarms", below=1)

    @property
    def confidence(self) -> float:
        """The confidence of each comparison's interval at which the suite's false alarms stay below `false_alarms`."""
        return 1 - 2 * self.false_alarms / (self.comparisons * len(LOOKS))

    @property
    def floor(self) -> float:
        """The ratio below which a shortfall matters."""
        return self.limit / (1 + self.effect)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict on one arm, its exact interval, and the reason where it is undecided (`NOISE` or `STRADDLES`)."""

    verdict: Verdict
    ratio: float
    low: float
    high: float
    reason: str = ""


BASE, HEAD = "base", "head"

SIDES = (BASE, TWIN, HEAD)
"""The processes of a round: the base, the base once more, and the head."""

TARGET, EAGER, COMPILED = "target", "eager", "compiled"
"""Arms: the target without a mode or precision of ours, in eager mode, and compiled."""

DECIDED, LAUNCHES, BUDGET_SPENT, UNCHANGED = "decided", "launches", "budget", "unchanged"
"""Why a comparison ended."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The speed tests of earlier sessions.

    name: as messages call it. records: of each benchmark, none for one that ampcheck did not make. unreadable:
    benchmarks whose record cannot be read, with the reason.
    """

    name: str = "the baseline"
    records: Mapping[str, tuple[SpeedRecord, ...]] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_records(cls, records: Iterable[SpeedRecord], name: str) -> Baseline:
        """Records, by the name of their benchmark."""
        by_name: dict[str, tuple[SpeedRecord, ...]] = {}
        for record in records:
            by_name[record.name] = (*by_name.get(record.name, ()), record)
        return cls(name, by_name)

    @property
    def known(self) -> list[str]:
        """The speed tests in it."""
        return [title for title, records in self.records.items() if records or title in self.unreadable]

    def same(self, record: SpeedRecord) -> list[SpeedRecord]:
        """Its records of the same arms in the benchmark of the same name."""
        return [old for old in self.records[record.name] if (old.arm, old.reference) == (record.arm, record.reference)]


@dataclass(frozen=True, slots=True)
class ArmComparison:
    """An arm beside the reference, judged by a rule.

    noise: how far the interval of the reference's twin reaches from 1, as a share. needed: the cycles without which the
    interval of the arm is infinite.
    """

    stats: SpeedStats
    arm: ArmTimes
    rule: Rule
    decision: Decision
    noise: float
    needed: int

    @property
    def name(self) -> str:
        """The subject as findings name it."""
        return self.stats.subject


@dataclass(frozen=True, slots=True)
class HeadComparison:
    """The head beside a base, as `ampcheck speed --base` launched them.

    base: its name with the revision. failure: why the base could not run. stopped: why the comparison ended. judged:
    the arm of `decision`, None where no round was run; eager: the decision on its reference, if there is one, and
    speedups: over it, on base and head. deviation: of one process, as a share of its time; noise: of the base's twin.
    idle: that no file that differs was imported, if so.
    """

    subject: str
    base: str
    rule: Rule
    failure: str = ""
    stopped: str = LAUNCHES
    judged: str = TARGET
    decision: Decision | None = None
    eager: Decision | None = None
    speedups: tuple[float, float] = (1.0, 1.0)
    launches: int = 0
    cycles: int = 0
    deviation: float = math.inf
    noise: float = 0.0
    idle: str = ""
    threads: Threads | None = None


@dataclass(frozen=True, slots=True)
class StoredComparison:
    """A record beside those of earlier sessions. effect: the smallest change that counts; None: only whether there is
    something to compare with."""

    new: SpeedRecord
    baseline: Baseline
    effect: float | None = None

    @property
    def name(self) -> str:
        """The subject as findings name it."""
        return self.new.name


@dataclass(frozen=True, slots=True)
class MissingTests:
    """Speed tests of a baseline that did not run."""

    name: str
    missing: tuple[str, ...]
