"""A result of the shadowed run, and how far another run lies from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ampcheck.core.formats import format_of
from ampcheck.facts.moves import MOVE
from ampcheck.shadow.bounds import FLOOR, JUDGED_UNIT, SLACK, UNKNOWABLE, Examination, is_chance

Key: TypeAlias = tuple[str, str, int]
"""What a result is: kind (`output`, `loss`, `gradient`, `update`, `buffer`), name, number of the call."""

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
class Reference:
    """The companions of one result of an eager run: its exact value, with which other runs of the call are compared.

    exact: float64. moved: float32, see `ampcheck.facts.values`. unit: the unit roundoff of the coarsest format
    that the eager run used on the way.
    """

    exact: torch.Tensor
    moved: torch.Tensor
    unit: float


@dataclass(frozen=True, slots=True)
class Result:
    """One result of the shadowed run.

    reference: None for integers, which have no companions. terms: of the longest sum that it was made with, whose order
    is free: float32 shows it, and no format of 16 bits. roundings: to 16 bits in a row, at the most.
    """

    value: torch.Tensor = field(repr=False)
    reference: Reference | None = field(repr=False)
    terms: int = 1
    roundings: int = 8

    @property
    def nbytes(self) -> int:
        """The memory of the value and its companions."""
        known = () if self.reference is None else (self.reference.exact, self.reference.moved)
        return self.value.nbytes + sum(tensor.nbytes for tensor in known)


@dataclass(frozen=True, slots=True)
class ResultError:
    """How far a run lies from the exact value of one result.

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
        """How near it is to its limit; beyond 1 it is past it."""
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
        """Whether the data determine nothing of the result: a gradient that is zero by mathematics.

        Where terms cancel to the last bit in float64, however they are moved, float32 alone leaves their roundings.
        """
        cancels = self.kind == "gradient" and not self.size and self.unit <= JUDGED_UNIT
        return cancels or self.seen.spread > UNKNOWABLE

    @property
    def known(self) -> bool:
        """Whether the data determine the value at all; the gradient of a bias that a norm takes out again is zero."""
        return self.seen.flagged > 0 or not self.noise

    @property
    def determined(self) -> bool:
        """Whether the data determine more than a bit of a gradient, however small it is beside the others."""
        return self.eager is not None and self.limit <= 0.5

    @property
    def negligible(self) -> bool:
        """Whether it is a gradient whose error is no more than a rounding of all gradients of the call together."""
        small = self.kind == "gradient" and self.share <= FLOOR * self.unit
        return small and not (self.determined and self.at_fault)

    @property
    def ruined(self) -> bool:
        """Whether nothing is left of an output that the data determine in float32: they are moved by `MOVE` alone."""
        lost = self.kind == "output" and self.seen.error > LOST and self.seen.spread * MOVE <= 0.75 * self.unit
        share = self.unit / max(self.seen.spread, self.unit, 1e-300)
        return lost and not is_chance(share, self.seen.numel // self.seen.groups)

    @property
    def at_fault(self) -> bool:
        """Whether the run lies beyond its bound where eager mode does not, and nothing explains it."""
        return self.verdict in (BEYOND, CAST)

    def fails(self, precision: float) -> bool:
        """Whether the run is at fault beside eager mode, under another `Limits.precision` than the usual 2.

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
        """Whether rounding does not explain the error, and, for a gradient, whether it moves the whole gradient.

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
