"""Numbers that depend on the loss scale and have left the run: code multiplies by them, and returns them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampcheck.training.scale.degree import NONE, UNKNOWN, Degree, Place

_DIGITS = 4
"""So many digits say most numbers that somebody wrote down."""


@dataclass(frozen=True, slots=True)
class Read:
    """A number that left the run. step: in which. of_scale: whether it is the scale itself, else it was computed."""

    value: float
    degree: Degree
    place: Place
    step: int
    of_scale: bool


class Numbers:
    """The numbers that left the run.

    decided: the line at which one was read that code may have branched by: it is not the scale, which code compares
    with that of before to see whether a step was skipped, and not what its step returned. twofold: whether one was
    used that two scales of the same step were equal to.
    """

    def __init__(self) -> None:
        self.decided: Place | None = None
        self.twofold = False
        self._reads: list[Read] = []  # of the last step
        self._known: dict[float, list[tuple[int, Degree]]] = {}  # with their steps; of reciprocals as well
        self._scales: dict[float, Degree] = {}  # those of the last step that are scales, and their reciprocals
        self._used: dict[float, Degree] = {}  # those that multiplied what is followed, outside of a backward pass

    def __bool__(self) -> bool:
        return bool(self._known)

    def is_known(self, value: float) -> bool:
        """Whether a number of this value left the run."""
        return value in self._known

    def add(self, read: Read) -> None:
        """Note a number by which code may multiply. It has the degree of each scale of its step that is equal to it."""
        if any(other.step != read.step for other in self._reads):
            self.close()
        self._reads.append(read)
        if not read.value or not math.isfinite(read.value):
            return
        for value, degree in ((read.value, read.degree), (1.0 / read.value, read.degree.times(-1.0))):
            common = _is_common(value)
            before = [(s, d) for s, d in self._known.get(value, ()) if s == read.step and d.powers != degree.powers]
            self._known[value] = [(read.step, UNKNOWN if common else degree), *before]
            if read.of_scale and not common:
                self._scales[value] = degree

    def close(self) -> None:
        """End a step: what it read may have decided what comes next."""
        computed = (read.place for read in self._reads if not read.of_scale)
        self.decided = self.decided or next(computed, None)
        self._reads, self._scales = [], {}

    def factor(self, value: float, other: Degree, *, in_pass: bool) -> Degree | None:
        """The degree of a factor, None where that is not known. other: of what it multiplies; in_pass: in a backward
        pass, whose numbers are those of the forward pass, or of the formula of a derivative."""
        if in_pass:
            return self._used.get(value, NONE)
        if type(value) is int:  # a size, or the scale
            return None if value in self._known else NONE
        if known := self._known.get(value):
            degrees = [degree for _, degree in known]
            degree = next((d for d in degrees if d.powers.keys() & other.powers.keys()), degrees[0])
            self.twofold |= len(degrees) > 1
            self._used[value] = degree
            return degree
        return self._written(value)

    def _written(self, value: float) -> Degree | None:
        """The degree of a number that code wrote down, or of a product of one and a scale: what has fewer digits. Sizes
        are whole, and double as scales do."""
        digits = _digits(value)
        products = {scale: _digits(value / scale) for scale in self._scales}
        fewest = min(products.values(), default=_DIGITS + 1)
        doubles = math.frexp(value)[0] == 0.5 and fewest <= _DIGITS and not _is_common(value)
        if digits < fewest and not doubles:
            return NONE
        possible = [self._scales[scale] for scale, number in products.items() if number == fewest]
        if fewest >= min(digits, _DIGITS) or len(possible) > 1 or value.is_integer():
            return None
        self._used[value] = possible[0]
        return possible[0]

    def returned(self, value: float) -> tuple[Read, Degree] | None:
        """The number that makes what the last step returned depend on the scale, as it is or times a scale, and the
        degree that it has then; None where there is none. Numbers that it is made of decided nothing."""
        made: list[tuple[Read, Degree]] = []
        scales = [read for read in self._reads if read.of_scale]
        for read in self._reads if _digits(value) > _DIGITS else ():
            if read.value == value:
                made.append((read, read.degree))
            for scale in (other for other in scales if other is not read):
                if read.value / scale.value == value:
                    made.append((read, read.degree.over(scale.degree)))
                elif read.value * scale.value == value:
                    made.append((read, read.degree.of_product(scale.degree)))
        own = {id(read) for read, _ in made}
        self._reads = [read for read in self._reads if id(read) not in own]
        self.close()
        return made[0] if made and all(degree.depends for _, degree in made) else None


def _is_common(value: float) -> bool:
    """Whether code has such a number often for another reason."""
    return 0.125 <= abs(value) <= 8.0


def _digits(value: float) -> int:
    """How many digits say a number; more than `_DIGITS` of most that nobody wrote down."""
    return next((n for n in range(1, _DIGITS + 1) if float(f"{value:.{n}g}") == value), _DIGITS + 1)
