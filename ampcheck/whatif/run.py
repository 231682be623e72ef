"""`whatif`: what a model would lose in recipes of narrow formats, and the front of which layers to keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.core.arguments import parse_dtypes, parse_flag, parse_number
from ampcheck.core.errors import UsageError
from ampcheck.core.progress import Progress
from ampcheck.core.run import Run, emit
from ampcheck.core.subject import MODELS, Subject, as_subject, load_subject, name_of
from ampcheck.records.whatif import FormatLoss, LayerLoss, Point, TrainingWhatIf, WhatIf
from ampcheck.torchtools.seeds import seeded
from ampcheck.whatif.front import Choice, Front, is_best
from ampcheck.whatif.linear import Products
from ampcheck.whatif.measure import Results, Runner, share_of_narrow
from ampcheck.whatif.recipes import PRODUCTS, Recipe, parse_recipes
from ampcheck.whatif.report import run_of
from ampcheck.whatif.training import STEPS, measure_training

POINTS = 8
"""Choices of a front that a run verifies."""


def whatif(
    subject: Any,
    recipes: str | Recipe | Iterable[str | Recipe] = ("rowwise", "mxfp8", "nvfp4"),
    *,
    front: bool = True,
    budget: float | None = None,
    dtype: Any = None,
    steps: int = STEPS,
    name: str = "",
    progress: Progress | None = None,
) -> Run:
    """Return what a model, or training, would lose in recipes of narrow formats, forward and backward, in its own run.

    subject: `(module, args)`, a `Subject` of a model or of training, or a target such as
    `transformers:LlamaForCausalLM`. recipes: names out of `ampcheck.whatif.RECIPES`, or a `Recipe`.

    Of a model: front: measure the effect of each layer alone, and verify choices of layers to keep, one run for each
    layer and recipe. budget: bits per weight of a choice to verify; its filter is `filter_text(measure(...), budget)`.
    dtype: run under autocast to `bfloat16` or `float16`; by default as the model is. The run has a finding of
    `format-loss` for each recipe or lost layer, a table of layers and recipes, and the front.

    Of training: steps: how many steps of optimizers each run makes. The run has a finding of `format-drift` for each
    recipe, in all layers and in all but the first and the last, and the losses by step.

    No finding fails. Raises `UsageError` for an unknown recipe, and for a subject that raises.
    """
    what = measure_either(
        _loaded(subject, name, trains=True),
        recipes,
        front=front,
        budget=budget,
        dtype=dtype,
        steps=steps,
        progress=progress,
    )
    run = run_of(what)
    emit(run)
    return run


def measure_either(
    subject: Subject,
    recipes: str | Recipe | Iterable[str | Recipe],
    *,
    front: bool,
    budget: float | None,
    dtype: Any,
    steps: int,
    progress: Progress | None = None,
) -> WhatIf | TrainingWhatIf:
    """The record of `whatif` of a model or of training, with its arguments."""
    if subject.kind in MODELS:
        return measure(subject, recipes, front=front, budget=budget, dtype=dtype, progress=progress)
    if budget is not None or dtype is not None:
        raise UsageError(f"a budget and a dtype are for models; {subject.name} trains, in its own precision")
    return measure_training(subject, recipes, steps=steps, progress=progress)


def measure(
    subject: Any,
    recipes: str | Recipe | Iterable[str | Recipe],
    *,
    front: bool = True,
    budget: float | None = None,
    dtype: Any = None,
    name: str = "",
    progress: Progress | None = None,
) -> WhatIf:
    """The record of `whatif`, with its arguments."""
    parsed = parse_recipes(recipes)
    parse_flag(front, "front")
    if budget is not None:
        parse_number(budget, "budget")
        if not front:
            raise UsageError("a budget is spent along the front: leave front=False out")
    cast = None if dtype is None else getattr(torch, parse_dtypes(dtype, choices=("float16", "bfloat16"))[0])
    loaded = _loaded(subject, name)
    trial = _Trial(loaded, parsed, Runner(loaded, cast), progress or (lambda *_: None))
    losses = trial.losses(alone=front)
    points = trial.front(losses, budget) if front else ()
    return WhatIf(loaded.name, losses, points, dict(trial.watched.unseen))


def _loaded(subject: Any, name: str, *, trains: bool = False) -> Subject:
    with seeded():
        if isinstance(subject, str):
            return load_subject(subject, trains=trains)
        of_model = name_of(subject[0]) if isinstance(subject, tuple) and subject else "subject"
        return as_subject(subject, name or of_model)


@dataclass
class _Trial:
    """The runs of one subject: `watched` has the products of the run in its own precision, `reference` its results."""

    subject: Subject
    recipes: Sequence[Recipe]
    runner: Runner
    progress: Progress

    def __post_init__(self) -> None:
        self.watched = Products(observed=self.recipes)
        self.reference: Results = self.runner.run(self.watched)
        self.modules = tuple(self.watched.weights)
        self._uniform = {recipe.name: self.runner.run(self._all_in(recipe)) for recipe in self.recipes}
        self._by_name = {recipe.name: recipe for recipe in self.recipes}

    def _all_in(self, recipe: Recipe) -> Products:
        return Products(dict.fromkeys(self.modules, recipe))

    def losses(self, *, alone: bool) -> tuple[FormatLoss, ...]:
        """Return what is lost by recipe. alone: measure each layer's effect on the whole model, too."""
        effects = self._effects() if alone else {}
        return tuple(self._loss(recipe, effects) for recipe in self.recipes)

    def _effects(self) -> dict[tuple[str, str], float]:
        """The error of the model with one layer in a recipe, by both."""
        pairs = [(module, recipe) for recipe in self.recipes for module in self.modules]
        effects = dict[tuple[str, str], float]()
        for number, (module, recipe) in enumerate(pairs):
            self.progress(f"{module} in {recipe.name}", number, len(pairs))
            effects[module, recipe.name] = self._error(Products({module: recipe}))
        return effects

    def _error(self, products: Products) -> float:
        return self.runner.run(products).error(self.reference)

    def _loss(self, recipe: Recipe, effects: Mapping[tuple[str, str], float]) -> FormatLoss:
        lost = self.watched.losses
        layers = tuple(
            LayerLoss(
                module,
                weights,
                {p: lost[recipe.name, module, p] for p in PRODUCTS if (recipe.name, module, p) in lost},
                effects.get((module, recipe.name), math.nan),
            )
            for module, weights in self.watched.weights.items()
        )
        run = self._uniform[recipe.name]
        narrow = share_of_narrow(self.watched, recipe)
        error = run.error(self.reference)
        return FormatLoss(
            self.subject.name,
            recipe.name,
            recipe.bits,
            layers,
            error,
            run.loss,
            self.reference.loss,
            narrow,
            self.reference.of,
        )

    def front(self, losses: Sequence[FormatLoss], budget: float | None) -> tuple[Point, ...]:
        """Choices of layers and recipes, each verified by a run, from 16 bits down; then each recipe in all layers."""
        if not self.modules:
            return ()
        errors = {m: {loss.recipe: loss.layers[i].alone for loss in losses} for i, m in enumerate(self.modules)}
        bits = {recipe.name: recipe.bits for recipe in self.recipes}
        budgets = [*bits.values(), *([] if budget is None else [budget])]
        picked = Front(errors, self.watched.weights, bits).spread(POINTS, budgets)
        measured = [(choice, self._verified(choice)) for choice in picked]
        uniform = [(loss, math.sqrt(sum(layer.alone**2 for layer in loss.layers))) for loss in losses]
        pairs = [(choice.bits, error) for choice, error in measured] + [(loss.bits, loss.error) for loss in losses]
        return (
            *(Point("mixed", c.bits, c.recipes, c.error, e, is_best(c.bits, e, pairs)) for c, e in measured),
            *(
                Point(loss.recipe, loss.bits, dict.fromkeys(self.modules, loss.recipe), predicted, loss.error,
                      is_best(loss.bits, loss.error, pairs))
                for loss, predicted in uniform
            ),
        )  # fmt: skip

    def _verified(self, choice: Choice) -> float:
        return self._error(Products({m: self._by_name[recipe] for m, recipe in choice.recipes.items()}))
