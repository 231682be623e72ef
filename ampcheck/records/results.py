"""Distances of a value from its exact companion, and of a result of a run from that of another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from ampcheck.core.formats import format_of

MOVE = 2.0**-11
"""Distance by which entering data is moved, relative to its size: the unit roundoff of float16. Results scale it
linearly."""

SLACK = 8.0
"""Honest errors reach a few times what a sample shows: standard deviations."""

FLOOR = 4.0
"""The honest error of a value by roundings on the way to it, in unit roundoffs: at most this, see `floor_of`."""

UNKNOWABLE = 0.3
"""A relative spread beyond which the data determine nothing of a value: a gradient that is zero by mathematics."""

_CHANCE = 1e-3
"""The odds up to which terms that cancel are no chance. One number of either sign is near zero now and then: a mean of
advantages, a correlation. Its odds to be a thousandth of its terms are about that; those of several multiply."""

JUDGED_UNIT = 2.0**-12
"""Values with a coarser format in their history are judged for digits; float32 alone loses none that matter here."""

Key: TypeAlias = tuple[str, str, int]
"""Identity of a result: kind (`output`, `loss`, `gradient`, `update`, `buffer`), name, number of the call."""

CHANGES = ("update", "buffer", "input")
"""Kinds of results that are differences: a weight, buffer or argument after all calls less the same before."""

WHOLE = frozenset(("gradient", "update"))
"""Kinds that are judged as one group: their rows flip with the kinks of forward."""

PRECISION = 2.0
"""The default of `Limits.precision`, with which the bounds of `ampcheck.shadow` apply as they are."""

LOST = 0.25
"""Relative error of an output from which less than two bits agree: whatever explains it, the value is lost."""

FLOAT32 = format_of("float32").unit_roundoff

INTEGERS = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"))

WITHIN, BEYOND, CAST, TIE, EDGE = "within", "beyond", "cast", "tie", "edge"
"""Verdicts: within its bound; beyond it; a cast that the author means is left out; a decision near a tie explains it;
inf and NaN that eager mode has about as many of: the edge of overflow."""


@dataclass(frozen=True, slots=True)
class Examination:
    """Errors of one value.

    lost: elements that are not finite although their exact companions are, or that a cast to 8 bits, `saturated`, cut
    off far below them; masked: all of these are negative infinities
    where exact is next to the lowest number. flagged: groups beyond their bounds, of `groups`. error, spread: relative
    norms of the worst flagged group, else of the whole. limit: the bound of that group. impact: the norm of the errors
    of flagged groups relative to the norm of exact. flushed: the share of that error in elements below the normal
    numbers of the format; zeroed: those of them that are zero. emptied: the value is zero throughout. exact_nan,
    exact_inf: elements of exact itself.
    """

    numel: int
    lost: int = 0
    nan: int = 0
    masked: bool = False
    saturated: int = 0
    flagged: int = 0
    groups: int = 1
    error: float = 0.0
    spread: float = 0.0
    limit: float = 0.0
    impact: float = 0.0
    flushed: float = 0.0
    zeroed: int = 0
    emptied: bool = False
    exact_nan: int = 0
    exact_inf: int = 0

    @property
    def beyond(self) -> bool:
        """True if the value is worse than an honest one."""
        return self.lost > 0 or self.flagged > 0


def is_chance(share: float, numbers: int) -> bool:
    """Return whether so many numbers, of which `share` of their terms is left, may be as near to zero by chance."""
    return share**numbers > _CHANCE


@dataclass(frozen=True, slots=True)
class ResultError:
    """Distance of a run from the exact value of one result.

    seen: the value beside its exact one; eager: that of the shadowed run, where another run was compared. dtype: of the
    shadowed run. unit, floor: what both were judged by. norm, eager_norm: of the errors; size: the norm of exact;
    total: that of all results of this kind in this call. along: the error along exact, relative to it: a wrong scale.
    apart: the norm of the difference of the two runs, relative to exact; of integers, the share of elements that
    differ. misplaced: infinities of exact in whose place stands another value. lost: elements that are inf or NaN, or
    not, unlike those of exact and of eager mode; hidden: elements that are inf or NaN in eager mode alone; nan: NaN in
    exact and in the run alike. judged: elements of which something
    is known. excused: the run lies within its bound wherever eager mode is finite. absent: the run gave no such
    result, or one of another shape. verdict: one of the constants above.
    """

    key: Key
    dtype: str
    seen: Examination
    unit: float = 0.0
    norm: float = 0.0
    size: float = 1.0
    total: float = 1.0
    misplaced: int = 0
    absent: bool = False
    eager: Examination | None = None
    eager_norm: float = 0.0
    along: float = 0.0
    floor: float = FLOOR
    apart: float = 0.0
    lost: int = 0
    hidden: int = 0
    nan: int = 0
    excused: bool = False
    judged: int = 0
    verdict: str = WITHIN

    @property
    def kind(self) -> str:
        """The first of its key."""
        return self.key[0]

    @property
    def name(self) -> str:
        """The second of its key."""
        return self.key[1]

    @property
    def step(self) -> int:
        """The number of the call."""
        return self.key[2]

    @property
    def error(self) -> float:
        """The relative error, Euclidean norms: of the worst group beyond its bound, else of the whole."""
        return math.inf if self.absent else self.seen.error

    @property
    def limit(self) -> float:
        """The bound of that group, or of the whole."""
        return self.seen.limit or SLACK * (self.seen.spread + self.floor * self.unit)

    @property
    def times(self) -> float:
        """The error as a multiple of its limit; above 1 it is beyond."""
        return self.error / self.limit if self.limit else 0.0

    @property
    def whole(self) -> float:
        """The relative error of the whole."""
        return self.norm / (self.size or self.total or 1.0)

    @property
    def eager_error(self) -> float:
        """The relative error of the whole in eager mode."""
        return self.eager_norm / (self.size or self.total or 1.0)

    @property
    def share(self) -> float:
        """The norm of the error over that of all exact results of this kind in this call."""
        return self.norm / (self.total or 1.0)

    @property
    def nonfinite(self) -> int:
        """Elements that are not finite although exact is."""
        return self.seen.lost

    @property
    def noise(self) -> bool:
        """True if the data determine nothing of the result: a gradient that is zero by mathematics.

        Where terms cancel to the last bit in float64, however they are moved, float32 alone leaves their roundings.
        """
        cancels = self.kind == "gradient" and not self.size and self.unit <= JUDGED_UNIT
        return cancels or self.seen.spread > UNKNOWABLE

    @property
    def known(self) -> bool:
        """True if the data determine the value at all; the gradient of a bias that a norm takes out again is zero."""
        return self.seen.flagged > 0 or not self.noise

    @property
    def determined(self) -> bool:
        """True if the data determine more than a bit of a gradient, however small it is beside the others."""
        return self.eager is not None and self.limit <= 0.5

    @property
    def negligible(self) -> bool:
        """True if it is a gradient whose error is no more than a rounding of all gradients of the call together."""
        small = self.kind == "gradient" and self.share <= FLOOR * self.unit
        return small and not (self.determined and self.at_fault)

    @property
    def ruined(self) -> bool:
        """True if nothing is left of an output that the data determine in float32: they are moved by `MOVE` alone."""
        lost = self.kind == "output" and self.seen.error > LOST and self.seen.spread * MOVE <= 0.75 * self.unit
        share = self.unit / max(self.seen.spread, self.unit, 1e-300)
        return lost and not is_chance(share, self.seen.numel // self.seen.groups)

    @property
    def at_fault(self) -> bool:
        """True if the run lies beyond its bound where eager mode does not, and nothing explains it."""
        return self.verdict in (BEYOND, CAST)

    def fails(self, precision: float) -> bool:
        """Return whether the run is at fault beside eager mode, under another `Limits.precision` than the usual 2.

        Larger values scale every bound but equality, smaller ones those of whole results.
        """
        scale, eager = precision / PRECISION, self.eager
        if self.at_fault:
            equal = self.absent or self.lost > 0 or self.verdict == CAST or self.dtype in INTEGERS
            return equal or self.error > self.limit * scale
        if scale >= 1 or self.verdict != WITHIN or eager is None or not self.beyond(precision):
            return False
        return eager.error <= scale * SLACK * (eager.spread + self.floor * self.unit)

    def beyond(self, precision: float) -> bool:
        """Return whether rounding does not explain the error, and, for a gradient, whether it moves the whole gradient.

        precision: as in `Limits`; larger values scale the bounds. It does not ask whether eager mode is at fault, too.
        """
        if self.nonfinite or self.misplaced or self.absent or self.ruined:
            return True
        if self.eager is not None and self.unit < JUDGED_UNIT:
            return self.at_fault  # digits of float32, of which the rows are judged beside eager mode
        if not self.known or self.error <= self.limit * precision / PRECISION:
            return False
        return not self.negligible

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip() + (f" at step {self.step}" if self.step else "")
