"""`whatif`: what a model would lose in recipes of narrow formats, and the front of which layers to keep."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcheck.checks import findings
from ampcheck.core.arguments import parse_dtypes, parse_flag, parse_number
from ampcheck.core.charts import Chart, Series
from ampcheck.core.environment import environment
from ampcheck.core.errors import UsageError
from ampcheck.core.formats import format_of
from ampcheck.core.progress import Progress
from ampcheck.core.run import Coverage, Run, Table, emit
from ampcheck.core.settings import resolve_limits
from ampcheck.core.subject import Subject, as_subject, load_subject, name_of
from ampcheck.records.whatif import FormatLoss, LayerLoss, Point, WhatIf, decibels
from ampcheck.torchtools.seeds import seeded
from ampcheck.whatif.front import Choice, Front, is_best
from ampcheck.whatif.linear import Products
from ampcheck.whatif.measure import Execution, Runner, share_of_narrow
from ampcheck.whatif.recipes import PRODUCTS, Recipe, parse_recipes

POINTS = 8
"""Choices of a front that a run verifies."""

_CHECK = "format-loss"


def whatif(
    subject: Any,
    recipes: str | Recipe | Iterable[str | Recipe] = ("rowwise", "mxfp8", "nvfp4"),
    *,
    front: bool = True,
    budget: float | None = None,
    dtype: Any = None,
    name: str = "",
    progress: Progress | None = None,
) -> Run:
    """What a model would lose in recipes of narrow formats, forward and backward, in its own run.

    subject: `(module, args)`, a `Subject` of a model, or a target such as `transformers:LlamaForCausalLM`. recipes:
    names out of `ampcheck.whatif.RECIPES`, or a `Recipe`. front: measure the effect of each layer alone, and verify
    choices of layers to keep, one run for each layer and recipe. budget: bits per weight of a choice to verify; its
    filter is `filter_text(measure(...), budget)`. dtype: run under autocast to `bfloat16` or `float16`; by default as
    the model is.

    The run has a finding of `format-loss` for each recipe or lost layer, which never fails, a table of layers and
    recipes, and the front. Raises `UsageError` for an unknown recipe, and for a subject that is no model or raises.
    """
    what = measure(subject, recipes, front=front, budget=budget, dtype=dtype, name=name, progress=progress)
    run = run_of(what)
    emit(run)
    return run


def run_of(what: WhatIf) -> Run:
    """The findings, tables and chart of a record."""
    layers = {layer.module for loss in what.losses for layer in loss.layers}
    seen = {"linear layers": len(layers), "recipes": len(what.losses), "choices": len(what.front)}
    coverage = Coverage({sort: count for sort, count in seen.items() if count}, dict(what.unseen))
    tables = tuple(table for table in (_recipes_table(what), *_layer_tables(what), _front_table(what)) if table.rows)
    charts = (_chart(what),) if what.front else ()
    found = tuple(findings(what, resolve_limits(None)))
    return Run(environment(), found, coverage, tables, charts, title=f"narrow formats in {what.subject}")


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
    with seeded():
        loaded = load_subject(subject) if isinstance(subject, str) else as_subject(subject, name or _name(subject))
    trial = _Trial(loaded, parsed, Runner(loaded, cast), progress or (lambda *_: None))
    losses = trial.losses(alone=front)
    points = trial.front(losses, budget) if front else ()
    return WhatIf(loaded.name, losses, points, dict(trial.watched.unseen))


def _name(subject: Any) -> str:
    return name_of(subject[0]) if isinstance(subject, tuple) and subject else "subject"


@dataclass
class _Trial:
    """The runs of one subject: `watched` has the products of the run in its own precision, `reference` its results."""

    subject: Subject
    recipes: Sequence[Recipe]
    runner: Runner
    progress: Progress

    def __post_init__(self) -> None:
        self.watched = Products(observed=self.recipes)
        self.reference: Execution = self.runner.run(self.watched)
        self.modules = tuple(self.watched.weights)
        self._uniform = {recipe.name: self.runner.run(self._all_in(recipe)) for recipe in self.recipes}
        self._by_name = {recipe.name: recipe for recipe in self.recipes}

    def _all_in(self, recipe: Recipe) -> Products:
        return Products(dict.fromkeys(self.modules, recipe))

    def losses(self, *, alone: bool) -> tuple[FormatLoss, ...]:
        """What is lost by recipe. alone: measure each layer's effect on the whole model, too."""
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


# What a run shows -----------------------------------------------------------------------------------------------------


def _recipes_table(what: WhatIf) -> Table:
    columns = ("recipe", "bits per weight", "weights, bytes", "narrow products", f"error of {_of(what)}", "dB", "loss")
    rows = [
        (loss.recipe, round(loss.bits, 3), round(sum(layer.weights for layer in loss.layers) * loss.bits / 8),
         f"{loss.narrow_share:.0%}", loss.error, decibels(loss.error), loss.loss if loss.loss is not None else "")
        for loss in what.losses
    ]  # fmt: skip
    own = what.losses[0].reference if what.losses else None
    note = "error: of all gradients, or of the outputs without any, relative to the run in the model's own precision"
    return Table(
        "All linear layers in a recipe",
        columns,
        tuple(rows),
        _CHECK,
        f"{note}, whose loss is {own:.4g}" if own else note,
    )


def _of(what: WhatIf) -> str:
    """What the errors are of: `gradients`, or `outputs` of a model that gives none."""
    return what.losses[0].of if what.losses else "gradients"


def _layer_tables(what: WhatIf) -> list[Table]:
    roundoff = format_of("bfloat16").unit_roundoff
    columns = ("layer", "weights", "output, dB", "input's gradient, dB", "weight's gradient, dB", "in roundings",
               "saturated", "flushed", "alone")  # fmt: skip
    tables = []
    for loss in what.losses:
        rows = []
        for layer in loss.layers:
            by_product = [layer.products[p].decibels if p in layer.products else "" for p in PRODUCTS]
            noises = [p.noise for p in layer.products.values()]
            rows.append((
                layer.module, layer.weights, *by_product, max(noises, default=0.0) / roundoff,
                f"{max((p.saturated for p in layer.products.values()), default=0.0):.1%}",
                f"{max((p.flushed for p in layer.products.values()), default=0.0):.1%}",
                "" if math.isnan(layer.alone) else layer.alone,
            ))  # fmt: skip
        note = f"roundings: of bfloat16; alone: error of all {loss.of} when this layer alone is in the recipe"
        tables.append(Table(f"Layers in {loss.recipe}", columns, tuple(rows), _CHECK, note))
    return tables


def _front_table(what: WhatIf) -> Table:
    columns = ("choice", "bits per weight", "error, measured", "error, predicted", "best", "layers")
    rows = [
        (p.name, round(p.bits, 3), p.measured, p.predicted, "yes" if p.best else "", _layers(what, p))
        for p in sorted(what.front, key=lambda p: -p.bits)
    ]
    note = "predicted: from single layers, whose squares add; measured: by a run of the whole choice"
    return Table("Which layers to keep", columns, tuple(rows), _CHECK, note)


def _layers(what: WhatIf, point: Point) -> str:
    """How many layers are in each format: `3 in 16 bits, 12 in nvfp4`."""
    counts = Counter(point.choice.get(module, "16 bits") for module in _weights(what))
    return ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))


def _weights(what: WhatIf) -> dict[str, int]:
    return {layer.module: layer.weights for loss in what.losses[:1] for layer in loss.layers}


def filter_text(what: WhatIf, budget: float) -> str:
    """Python text of the filter functions, one for each recipe, by which torchao converts the layers of the verified
    choice that has the least error with at most `budget` bits per weight; "" if no finite choice fits the budget."""
    points = [p for p in what.front if p.bits <= budget + 1e-9 and math.isfinite(p.measured)]
    if not points:
        return ""
    best = min(points, key=lambda point: point.measured)
    lines = [
        f"# {what.subject}: {best.bits:.2f} bits per weight, {_of(what)} off by {best.measured:.2g} of their norm",
        f"# in 16 bits: {', '.join(best.kept(_weights(what))) or 'none'}",
    ]
    for recipe, name in _identifiers(best.choice.values()).items():
        modules = [module for module in _weights(what) if best.choice.get(module) == recipe]
        lines += ["", f"{name.upper()} = {{"]
        lines += [f"    {module!r}," for module in modules]
        lines += ["}", "", f"def {name}_filter_fn(module, fqn):", f"    return fqn in {name.upper()}"]
    return "\n".join(lines)


def _identifiers(recipes: Iterable[str]) -> dict[str, str]:
    """A distinct Python identifier for each recipe."""
    names = dict[str, str]()
    for recipe in sorted(set(recipes)):
        name = re.sub(r"\W|^(?=\d|$)", "_", recipe, flags=re.ASCII)
        while name.upper() in {other.upper() for other in names.values()}:
            name += "_"
        names[recipe] = name
    return names


def _chart(what: WhatIf) -> Chart:
    points = [point for point in what.front if math.isfinite(point.measured) and point.measured > 0]
    names = tuple(dict.fromkeys(point.name for point in points))
    lines = [[point for point in points if point.name == name] for name in names]
    series = tuple(
        Series(name, tuple(p.bits for p in line), tuple(p.measured for p in line))
        for name, line in zip(names, lines, strict=True)
    )
    title, labels = f"Error of {_of(what)} by bits per weight", ("bits per weight", "relative error")
    return Chart("line", title, *labels, series, check=_CHECK, y_scale="log")
