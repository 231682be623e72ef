"""The scales of GradScalers, each update of which makes another, and the numbers that code reads."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any

import torch

from ampcheck.facts.degree import NONE, UNKNOWN, Degree
from ampcheck.facts.parts import PartMap
from ampcheck.records.invariance import Place
from ampcheck.torchtools.patching import attribute
from ampcheck.torchtools.source import is_constant_here, users_line
from ampcheck.training.protocol.recorder import Recorder

_PARTS, _ROUNDING = 100, 2.0**-48
"""The largest denominator of a simple part, and what the arithmetic of a schedule may round."""

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
    with that of before to see whether a step was skipped, and not what its step returned. known: their steps and
    degrees, and those of their reciprocals.
    """

    def __init__(self) -> None:
        self.decided: Place | None = None
        self._reads: list[Read] = []  # of the last step
        self.known: dict[float, tuple[int, Degree]] = {}
        self._scales: dict[float, Degree] = {}  # those of the last step that are scales, and their reciprocals
        self._used: dict[float, Degree] = {}  # those that multiplied what is followed, outside of a backward pass

    def add(self, read: Read) -> None:
        """Note a number by which code may multiply. That of one which two scales of a step were equal to is unknown."""
        if any(other.step != read.step for other in self._reads):
            self.close()
        self._reads.append(read)
        if not read.value or not math.isfinite(read.value):
            return
        for value, degree in ((read.value, read.degree), (1.0 / read.value, read.degree.times(-1.0))):
            common, (step, before) = _is_common(value), self.known.get(value, (-1, degree))
            known = not common and (step != read.step or before.powers == degree.powers)
            self.known[value] = read.step, degree if known else UNKNOWN
            if read.of_scale and not common:
                self._scales[value] = degree

    def close(self) -> None:
        """End a step: what it read may have decided what comes next."""
        self.decided = self.decided or next((read.place for read in self._reads if not read.of_scale), None)
        self._reads, self._scales = [], {}

    def factor(self, value: float, *, in_pass: bool) -> Degree | None:
        """The degree of a factor, None where that is not known. in_pass: in a backward pass, whose numbers are those of
        the forward pass, or of the formula of a derivative."""
        if in_pass:
            return self._used.get(value, NONE)
        if type(value) is int:  # a size, or the scale
            return None if value in self.known else NONE
        degree = self.known[value][1] if value in self.known else self._written(value)
        if value in self.known and is_constant_here(sys._getframe(), value):
            degree = NONE
        if degree is not None and degree is not NONE:
            self._used[value] = degree
        return degree

    def made_option(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether code may have made an option, such as the learning rate, of a number that left the run.
        Options that the optimizer was made with are older than that."""
        made_with = {name: value for name, value in optimizer.defaults.items() if type(value) is float}
        options = [(made_with.get(n, 0.0), v) for group in optimizer.param_groups for n, v in group.items()]
        changed = [(before, value) for before, value in options if type(value) is float and value and value != before]
        return any(self._may_make(value, before) for before, value in changed)

    def _may_make(self, value: float, before: float) -> bool:
        """Return whether code may have made an option of a number that left the run: it is one, or the product of one
        and a number that somebody wrote down. before: the option as the optimizer was made, of which schedules take a
        simple part, such as 3/8 in a warm-up."""
        numbers = [number for number in self.known if not _is_common(number)]
        ratio = value / before if before else 0.0
        if not numbers or not math.isfinite(ratio):
            return False
        if ratio and abs(Fraction(ratio).limit_denominator(_PARTS) / Fraction(ratio) - 1) < _ROUNDING:
            return ratio in numbers
        fewest = min(_digits(value), _DIGITS)
        return value in numbers or any(_digits(value / number) < fewest for number in numbers)

    def _written(self, value: float) -> Degree | None:
        """The degree of a number that code wrote down, or of a product of one and a scale: what has fewer digits. Sizes
        are whole, and double as scales do."""
        digits = _digits(value)
        products = {scale: _digits(value / scale) for scale in self._scales}
        fewest = min(products.values(), default=_DIGITS + 1)
        doubles = math.frexp(value)[0] == 0.5 and fewest <= _DIGITS and not _is_common(value)
        if not value or (digits < fewest and not doubles):
            return NONE
        possible = [self._scales[scale] for scale, number in products.items() if number == fewest]
        sure = fewest < min(digits, _DIGITS) and len(possible) == 1 and not value.is_integer()
        return possible[0] if sure else None

    def returned(self, value: float) -> tuple[Read, Degree] | None:
        """Return the number that the last step returned, and its degree; None if that does not depend on the scale.

        A step may return the number itself, or divided by a scale. The numbers that it used decided nothing.
        """
        unit = Read(1.0, NONE, ("", None), 0, of_scale=True)
        scales = [unit, *(read for read in self._reads if read.of_scale)]
        pairs = [(a, b) for a in self._reads for b in scales if a is not b and _digits(value) > _DIGITS]
        made = [(a, a.degree.over(b.degree)) for a, b in pairs if b.value and a.value / b.value == value]
        self._reads = [read for read in self._reads if all(read is not own for own, _ in made)]
        self.close()
        return made[0] if made and all(degree.depends for _, degree in made) else None


class Scales:
    """Follows the scales of the scalers in use.

    recorder: what it asks a scaler is not the user's. degrees: takes those of the scales. numbers: takes scales that
    the user reads. used: whether one was. scaling: the degree of the scale while `scaler.scale` multiplies by it; at:
    the line of that call. reading: whether `scaler.get_scale` runs.
    """

    def __init__(self, recorder: Recorder, degrees: PartMap[Degree], numbers: Numbers) -> None:
        self.scaling: Degree | None = None
        self.at: Place = ("", None)
        self.used = self.reading = False
        self._recorder, self._degrees, self._numbers = recorder, degrees, numbers
        self._count = count(1)
        self._by_scaler: dict[int, Degree] = {}  # of the scale that its last update made

    def _degree_of_scale(self, scaler: Any) -> Degree:
        """The degree of the scale of a scaler, which its own tensor has from now on."""
        degree = self._by_scaler.setdefault(id(scaler), Degree({next(self._count): 1.0}))
        if isinstance(scale := getattr(scaler, "_scale", None), torch.Tensor):  # of an earlier run; else made on use
            self._degrees.put(scale, degree)
        return degree

    def scale(self, scaler: Any, *_: object, **__: object) -> Iterator[None]:
        """A loss is scaled."""
        if scaler.is_enabled():
            self.used, self.at = True, users_line(sys._getframe())
            with attribute(self, "scaling", self._degree_of_scale(scaler)):
                yield

    def read(self, scaler: Any) -> Generator[None, Any, None]:
        """The scale is read."""
        if scaler.is_enabled() and not self._recorder.asks:
            self.used, degree = True, self._degree_of_scale(scaler)
            with attribute(self, "reading", True):
                scale = yield
            place = users_line(sys._getframe())
            self._numbers.add(Read(float(scale), degree, place, self._recorder.step, of_scale=True))

    def update(self, scaler: Any, *_: object, **__: object) -> Iterator[None]:
        """Another scale is made."""
        yield
        if self._by_scaler.pop(id(scaler), None) is not None:
            self._degree_of_scale(scaler)


def _is_common(value: float) -> bool:
    """Return whether code has such a number often for another reason."""
    return 0.125 <= abs(value) <= 8.0


def _digits(value: float) -> int:
    """Return how many digits say a number; more than `_DIGITS` of most that nobody wrote down."""
    return next((n for n in range(1, _DIGITS + 1) if float(f"{value:.{n}g}") == value), _DIGITS + 1)
