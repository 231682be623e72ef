"""Record of the updates of tensors narrower than float32."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ampcheck.core.run import Coverage, Where

HORIZON = 10_000
"""Steps that are planned where neither the subject nor a schedule says how many."""

FOLLOWS = 0.1
"""An average that comes within this part of its size to what it follows does so."""

FAR = 0.2
"""An average that stays off what it follows by this part of its size has lost it."""

AVERAGE, MEAN, SUM = "average", "mean", "sum"


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a tensor stops if later steps add what the observed ones did; of the typical element.

    kind: `average`, `mean` or `sum`. gain: the part of its value that a step keeps then. distance: how far it may stay
    from what it follows, relative to its size; of a sum, the part of it that is missing at the horizon. steps: how many
    are left. value: its magnitude then. increment: what a step adds.
    """

    kind: str
    gain: float
    distance: float
    steps: int
    value: float
    increment: float


@dataclass(frozen=True, slots=True)
class Decay:
    """Effect of multiplications by a factor just below 1, with nothing added: of `looked` elements that they
    change in float32 `stuck` hold the same value afterwards."""

    factor: float = 1.0
    looked: int = 0
    stuck: int = 0
    op: str = ""

    def __add__(self, other: Decay) -> Decay:
        if not other.looked:
            return self
        return replace(other, looked=self.looked + other.looked, stuck=self.stuck + other.stuck)

    @property
    def share(self) -> float:
        """The share of the elements that it leaves as they are."""
        return self.stuck / self.looked if self.looked else 0.0


@dataclass(slots=True)
class VanishedConstant:
    """A constant that is zero in the format of what it is added to. of: the names of the tensors that this is made of.
    zeros: how many results were exactly zero. option: which option of an optimizer has this value (`eps`), else ""."""

    constant: float
    dtype: str
    op: str
    file: str
    line: int | None
    zeros: int = 0
    of: tuple[str, ...] = ()
    option: str = ""


@dataclass(slots=True)
class TensorUpdates:
    """A tensor narrower than float32 over the observed steps.

    moved: updates of elements that are not zero in exact; lost: those after which the element has the same value,
    without those that another tensor carries (`carried`, by `carriers`: a float32 copy, a compensation).
    overwritten: steps in which it was set to values that do not depend on it; steps: the others in which it was
    written. gains: per step, what it is multiplied by; None where that is not one number. squared_updates,
    squared_values: sums of the squares of the updates and of the old values. decay: what a multiplication by a factor
    below 1 does on its own.
    jumped: values that moved by updates too small for rounding to nearest, expected: how many random rounding would
    have moved; random: whether it is rounded at random.
    rate: the learning rate of a parameter. compensates: whether it carries what others lose. stop: where it will stop.
    largest: of a parameter whose learning rate is to grow, the largest; lost_at_largest: the share of its updates that
    is lost then. Of updates that were only counted, poisoned: in how many steps they ended in an infinity or a NaN;
    doubt: why they may not be lost, though elements stay as they are.
    """

    role: str
    name: str
    dtype: str
    elements: int
    moved: int = 0
    lost: int = 0
    carried: int = 0
    carriers: set[str] = field(default_factory=set)
    overwritten: int = 0
    steps: int = 0
    gains: list[float | None] = field(default_factory=list)
    squared_updates: float = 0.0
    squared_values: float = 0.0
    decay: Decay = field(default_factory=Decay)
    jumped: int = 0
    expected: float = 0.0
    random: bool = False
    rate: float = 1.0
    stop: Stop | None = None
    largest: float = 0.0
    lost_at_largest: float | None = None
    compensates: bool = False
    where: Where = field(default_factory=lambda: Where("update"))

    poisoned: int = 0
    doubt: str = ""

    @property
    def share(self) -> float:
        """The share of its updates that is lost: at the largest learning rate, where it is to grow."""
        if self.lost_at_largest is not None:
            return self.lost_at_largest
        return self.lost / self.moved if self.moved else 0.0

    @property
    def relative_update(self) -> float:
        """The norm of the updates by that of the tensor."""
        return math.sqrt(self.squared_updates / self.squared_values) if self.squared_values else 0.0

    @property
    def factors(self) -> list[float]:
        """The gains, if all are known; else empty."""
        known = [gain for gain in self.gains if gain is not None]
        return known if len(known) == len(self.gains) else []

    @property
    def averages(self) -> bool:
        """True if a step keeps a part of the value, and replaces the rest."""
        return bool(self.factors) and all(0.0 < factor < 1.0 for factor in self.factors)


@dataclass(frozen=True, slots=True)
class StagnationStats:
    """Updates of a loop in `steps` observed steps, and the elements that kept their value.

    looked: tensors that live across steps; narrow: those of them narrower than float32. error: why the loop stopped.
    horizon: how many steps are planned. waiting: narrow parameters that have gradients. counted: in which steps the
    elements that kept their value were counted, "" where float64 says what they should have become.
    """

    subject: str
    steps: int
    looked: int
    narrow: int
    tensors: tuple[TensorUpdates, ...] = ()
    vanished: tuple[VanishedConstant, ...] = ()
    error: str = ""
    horizon: int = HORIZON
    coverage: Coverage = field(default_factory=Coverage)
    waiting: frozenset[str] = frozenset()
    counted: str = ""
