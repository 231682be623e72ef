"""The degree of a value in the loss scale, and what its numbers say about the terms of a result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ampcheck.records.invariance import Place

_SLIGHT = 2.0**-11
"""Share of a result below which a term does not count, the roundoff of float16, as an eps beside a norm."""


@dataclass(frozen=True, slots=True)
class Degree:
    """The degree of a value. powers: by the number of a scale, without zeros; each update of a scaler makes another.
    place: the line of the user's code that made it so, where that combined values that depend on the scale. mixed: a
    sum of different degrees. known: of an unknown degree nothing is said. entered: it is made of numbers alone that
    were outside of the run, and may be products of a scale; that they leave it again, as a mean that is logged, decides
    nothing that they could not decide before.
    """

    powers: dict[int, float] = field(default_factory=dict)
    place: Place = ("", None)
    mixed: bool = False
    known: bool = True
    entered: bool = False

    @property
    def signature(self) -> tuple[tuple[int, float], ...]:
        """Equal for equal powers."""
        return tuple(sorted(self.powers.items()))

    def is_like(self, other: Degree | None) -> bool:
        """Return whether both say the same, wherever they come from; none is that of a constant."""
        other = other or NONE
        says = (self.powers, self.mixed, self.known, self.entered)
        return says == (other.powers, other.mixed, other.known, other.entered)

    @property
    def varies(self) -> bool:
        """True if it changes with the scale, or may."""
        return self.depends or not self.known

    @property
    def depends(self) -> bool:
        """True if it is known to change with the scale."""
        return self.mixed or bool(self.powers)

    def times(self, exponent: float) -> Degree:
        """The degree of a power."""
        powers = {s: p * exponent for s, p in self.powers.items() if exponent}
        return Degree(powers, self.place, self.mixed, self.known)

    def over(self, other: Degree) -> Degree:
        """The degree of a quotient."""
        return self.of_product(other.times(-1.0))

    def of_product(self, other: Degree) -> Degree:
        """The degree of a product."""
        own, others = self.powers.get, other.powers.get
        sums = {s: power for s in {*self.powers, *other.powers} if (power := own(s, 0.0) + others(s, 0.0))}
        place = self.place if self.place[0] else other.place
        return Degree(sums, place, self.mixed or other.mixed, self.known and other.known)


"""The value of a step, as distinct from a gradient."""

NOWHERE: Place = ("", None)
NONE = Degree()
UNKNOWN = Degree(known=False)
ENTERED = Degree(known=False, entered=True)


def joined(first: Degree, second: Degree) -> Degree:
    """The degree of what two parts of a memory hold together."""
    if first.is_like(second):
        return second
    return next((degree for degree in (first, second) if not degree.known), UNKNOWN)


def rest_of(result: torch.Tensor, term: torch.Tensor, factor: float) -> torch.Tensor:
    """Return what a result held before a term was added in place; zero where that is no more than the rounding."""
    whole = result.detach().double()
    rest = whole - factor * term.detach().double()
    return torch.where(rest.abs() <= 4 * torch.finfo(result.dtype).eps * whole.abs(), 0.0, rest)


def is_taken(term: Any, result: torch.Tensor) -> bool:
    """Return whether a limit was reached, or an alternative taken; so does what was overwritten count."""
    if term is None or isinstance(term, bool):
        return term is None
    return bool((result == term).any())


def counts(term: Any, result: torch.Tensor) -> bool:
    """Return whether a constant is a term, or a limit: no eps, which changes nothing at this scale."""
    if isinstance(term, torch.Tensor):
        return True
    if type(term) not in (int, float):
        return False
    return bool((result.detach().double().abs() * _SLIGHT < abs(term)).any())
