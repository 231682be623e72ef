"""Which layers to keep in 16 bits: choices by single layers' measured effects, cheapest step first. Numbers alone.

Errors of layers are taken to be independent, so that their squares add. Each layer's choices form a convex hull of
squared error over bits; the steps of all hulls, sorted by what they add for each bit that they save, are the front, as
the greedy solution of a knapsack whose gains fall. A run of the whole choice says what the assumption is worth.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

WIDE = 16.0
"""Bits of a layer that no recipe has."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe for each module, without those that stay wide; bits per weight; the predicted error."""

    recipes: Mapping[str, str]
    bits: float
    error: float


@dataclass(frozen=True, slots=True)
class Front:
    """Measurements from which choices are made.

    errors: by module and recipe, of the whole model with this layer alone in it; infinite where it breaks. weights: by
    module. bits: by recipe.
    """

    errors: Mapping[str, Mapping[str, float]]
    weights: Mapping[str, int]
    bits: Mapping[str, float]

    def choices(self) -> list[Choice]:
        """From all layers in 16 bits to each in the narrowest recipe of its hull."""
        steps = [(slope, module, recipe) for module in self.errors for slope, recipe in self._hull(module)]
        chosen = dict[str, str]()
        result = [self._choice(chosen)]
        for _, module, recipe in sorted(steps, key=lambda step: step[0]):
            chosen[module] = recipe
            result.append(self._choice(chosen))
        return result

    def _hull(self, module: str) -> Iterator[tuple[float, str]]:
        """The recipes of a layer from 16 bits down, each with the squared error that it adds for each bit saved."""
        at_bits, at_square = WIDE, 0.0
        while True:
            steps = [
                (
                    (error**2 - at_square) / (at_bits - self.bits[recipe]) / self.weights[module],
                    self.bits[recipe],
                    recipe,
                )
                for recipe, error in self.errors[module].items()
                if self.bits[recipe] < at_bits and math.isfinite(error)
            ]
            if not steps:
                return
            slope, at_bits, recipe = min(steps)
            at_square = self.errors[module][recipe] ** 2
            yield slope, recipe

    def _choice(self, chosen: Mapping[str, str]) -> Choice:
        mean = sum(self._size(module, chosen.get(module)) for module in self.weights) / (
            sum(self.weights.values()) or 1
        )
        return Choice(dict(chosen), mean, math.sqrt(sum(self._square(m, recipe) for m, recipe in chosen.items())))

    def _size(self, module: str, recipe: str | None) -> float:
        return self.weights[module] * (WIDE if recipe is None else self.bits[recipe])

    def _square(self, module: str, recipe: str | None) -> float:
        return 0.0 if recipe is None else self.errors[module][recipe] ** 2

    def within(self, bits: float) -> Choice | None:
        """The choice of the front with at most so many bits per weight, with what else fits into them; None where not
        even the narrowest does."""
        best = min((c for c in self.choices() if c.bits <= bits + 1e-9), key=lambda c: c.error, default=None)
        if best is None:
            return None
        chosen = dict(best.recipes)
        left = (bits - best.bits) * sum(self.weights.values()) + 1e-6
        while widened := max(self._widened(chosen, left), default=None):
            _, size, module, recipe = widened
            left -= size
            if recipe:
                chosen[module] = recipe
            else:
                del chosen[module]
        return self._choice(chosen)

    def _widened(self, chosen: Mapping[str, str], left: float) -> Iterator[tuple[float, float, str, str]]:
        """Layers that may take more bits: the squared error that each bit takes away, how many, module and recipe."""
        for module, now in chosen.items():
            for recipe in (None, *self.errors[module]):
                more = self._size(module, recipe) - self._size(module, now)
                gain = self._square(module, now) - self._square(module, recipe)
                if 0 < more <= left and gain > 0:
                    yield gain / more, more, module, recipe or ""

    def spread(self, count: int, also: Collection[float] = ()) -> list[Choice]:
        """Some of the choices, evenly by their place, and those within certain bits, from 16 bits down."""
        every = self.choices()
        places = {round(number * (len(every) - 1) / max(count - 1, 1)) for number in range(count)}
        found = [choice for bits in also if (choice := self.within(bits)) is not None]
        unique = {tuple(sorted(c.recipes.items())): c for c in (*(every[place] for place in places), *found)}
        return sorted(unique.values(), key=lambda choice: (-choice.bits, choice.error))


def is_best(bits: float, error: float, others: Collection[tuple[float, float]]) -> bool:
    """Return whether an error is finite, and none of the others has no more bits and no more error, one of them
    less."""
    return math.isfinite(error) and not any(b <= bits and e <= error and (b, e) != (bits, error) for b, e in others)
