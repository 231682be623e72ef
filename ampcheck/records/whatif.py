"""Record of the losses of a model in recipes of narrow formats, as emulated in its own forward and backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProductLoss:
    """Error of one product of a layer, from its own operands alone.

    noise: the norm of the error over that of the product, of the worst call; of_rows: the median of its rows.
    saturated, flushed: the largest parts of an operand's nonzero elements that saturate, and that become zero.
    """

    noise: float
    of_rows: float
    saturated: float = 0.0
    flushed: float = 0.0

    @property
    def decibels(self) -> float:
        """Signal to noise of the whole or of half its rows, whichever is worse."""
        return min(decibels(self.noise), decibels(self.of_rows))


def decibels(noise: float) -> float:
    """The signal to noise ratio of a relative error, in dB: minus infinity for NaN, as for an infinite error."""
    if math.isnan(noise):
        return -math.inf
    return -20 * math.log10(noise) if noise > 0 else math.inf


@dataclass(frozen=True, slots=True)
class LayerLoss:
    """Errors of one layer in one recipe. products: by `forward`, `grad_input` and `grad_weight`, those that the recipe
    narrows. alone: the error of the whole model's gradients when this layer alone is in the recipe; NaN where it was
    not measured."""

    module: str
    weights: int
    products: Mapping[str, ProductLoss]
    alone: float = math.nan

    @property
    def worst(self) -> tuple[str, ProductLoss]:
        """The product that loses most."""
        return min(self.products.items(), key=lambda item: item[1].decibels)


@dataclass(frozen=True, slots=True)
class FormatLoss:
    """A model with all its linear layers in one recipe. bits: per weight of these layers. loss: and `reference`, that
    of the run in the model's own precision; None where there is none. error: of all gradients, or of the outputs
    without any, relative to that run; `of` says which. narrow_share: the part of the layers' multiplications that is
    in narrow formats."""

    subject: str
    recipe: str
    bits: float
    layers: tuple[LayerLoss, ...]
    error: float
    loss: float | None = None
    reference: float | None = None
    narrow_share: float = 1.0
    of: str = "gradients"


@dataclass(frozen=True, slots=True)
class Point:
    """A choice of a recipe for each layer, and what it costs. choice: by module, without those that stay in 16 bits.
    predicted: the error by the sum of squares of single layers; measured: by a run of the whole choice."""

    name: str
    bits: float
    choice: Mapping[str, str] = field(repr=False)
    predicted: float
    measured: float
    best: bool = True

    def kept(self, modules: Iterable[str]) -> list[str]:
        """The modules that stay in 16 bits."""
        return [module for module in modules if module not in self.choice]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Measurements of a model: losses by recipe, the front of choices, and what was not emulated, by reason."""

    subject: str
    losses: tuple[FormatLoss, ...]
    front: tuple[Point, ...] = ()
    unseen: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingLoss:
    """Training in one recipe, or in its own precision.

    losses: by step. drift: the distance of the last weights from those that float64 has, over the way of these; 1 is
    that of weights that were not trained. layers: all linear layers; kept: those in 16 bits. still: the part of the
    weights that stand where they began, though float64 moved them. drifts: the least and the largest of `runs`, where
    the recipe is random. saturated, flushed: layer, product and the largest part of an operand's nonzero elements that
    did.
    """

    recipe: str
    losses: tuple[float, ...]
    drift: float
    layers: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    still: float = 0.0
    drifts: tuple[float, ...] = ()
    runs: int = 1
    saturated: tuple[str, str, float] = ("", "", 0.0)
    flushed: tuple[str, str, float] = ("", "", 0.0)


@dataclass(frozen=True, slots=True)
class TrainingWhatIf:
    """Training in several recipes. exact: the losses that float64 has, with the decisions of the training as it is;
    own: that training; unseen: what was not emulated, by reason."""

    subject: str
    exact: tuple[float, ...]
    own: TrainingLoss
    losses: tuple[TrainingLoss, ...]
    unseen: Mapping[str, int] = field(default_factory=dict)
