"""Which layers to keep in 16 bits: choices by single layers' measured effects, cheapest step first. Numbers alone.

Errors of layers are taken to be independent, so that their squares add. Each layer's choices form a convex hull of
squared error over bits; the steps of all hulls, sorted by what they add for each bit that they save, are the front, as
the greedy solution of a knapsack whose gains fall. A run of the whole choice says what the assumption is worth.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

WIDE = 16.0
"""Bits of a layer that no recipe has."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe for each module, without those that stay wide; bits per weight; the predicted error."""

    recipes: Mapping[str, str]
    bits: float
    error: float


def choices(
    errors: Mapping[str, Mapping[str, float]], weights: Mapping[str, int], bits: Mapping[str, float]
) -> list[Choice]:
    """From all layers in 16 bits to each in the narrowest recipe of its hull.

    errors: by module and recipe, of the whole model with this layer alone in it. weights: by module. bits: by recipe.
    """
    steps = [
        (slope, module, recipe)
        for module in errors
        for slope, recipe in _hull({r: error**2 for r, error in errors[module].items()}, weights[module], bits)
    ]
    chosen = dict[str, str]()
    result = [_choice(chosen, errors, weights, bits)]
    for _, module, recipe in sorted(steps, key=lambda step: step[0]):
        chosen[module] = recipe
        result.append(_choice(chosen, errors, weights, bits))
    return result


def _hull(squares: Mapping[str, float], weights: int, bits: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """The recipes of a layer from 16 bits down, each with the squared error that it adds for each bit saved."""
    at_bits, at_square = WIDE, 0.0
    while True:
        steps = [
            ((square - at_square) / (at_bits - bits[recipe]) / weights, bits[recipe], recipe)
            for recipe, square in squares.items()
            if bits[recipe] < at_bits and math.isfinite(square)
        ]
        if not steps:
            return
        slope, at_bits, recipe = min(steps)
        at_square = squares[recipe]
        yield slope, recipe


def _choice(
    chosen: Mapping[str, str],
    errors: Mapping[str, Mapping[str, float]],
    weights: Mapping[str, int],
    bits: Mapping[str, float],
) -> Choice:
    total = sum(weights.values()) or 1
    mean = (
        sum(count * (bits[chosen[module]] if module in chosen else WIDE) for module, count in weights.items()) / total
    )
    square = sum(errors[module][recipe] ** 2 for module, recipe in chosen.items())
    return Choice(dict(chosen), mean, math.sqrt(square))


def within(choices: Sequence[Choice], bits: float) -> Choice | None:
    """The choice of least error with at most so many bits per weight."""
    return min((c for c in choices if c.bits <= bits + 1e-9), key=lambda c: c.error, default=None)


def spread(choices: Sequence[Choice], count: int, also: Collection[float] = ()) -> list[Choice]:
    """Some of the choices, evenly by their place, and those within certain bits."""
    last = len(choices) - 1
    places = {round(number * last / max(count - 1, 1)) for number in range(count)}
    found = [choice for bits in also if (choice := within(choices, bits)) is not None]
    picked = {id(choice) for choice in (*(choices[place] for place in places), *found)}
    return [choice for choice in choices if id(choice) in picked]


def is_best(bits: float, error: float, others: Collection[tuple[float, float]]) -> bool:
    """Whether none of the others has no more bits and no more error, one of them less."""
    return not any(b <= bits and e <= error and (b, e) != (bits, error) for b, e in others)
