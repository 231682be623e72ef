"""Report of `whatif`: findings, tables and charts of its record."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

from ampcheck.checks import findings
from ampcheck.core.charts import Chart, Series
from ampcheck.core.environment import environment
from ampcheck.core.formats import format_of
from ampcheck.core.run import Coverage, Run, Table
from ampcheck.core.settings import resolve_limits
from ampcheck.records.whatif import Point, TrainingWhatIf, WhatIf, decibels
from ampcheck.whatif.recipes import PRODUCTS

_CHECK = "format-loss"
_DRIFT = "format-drift"


def run_of(what: WhatIf | TrainingWhatIf) -> Run:
    """The findings, tables and chart of a record."""
    seen, tables, chart = _of_training(what) if isinstance(what, TrainingWhatIf) else _of_model(what)
    coverage = Coverage({sort: count for sort, count in seen.items() if count}, dict(what.unseen))
    return Run(
        environment(),
        tuple(findings(what, resolve_limits(None))),
        coverage,
        tuple(table for table in tables if table.rows),
        (chart,) if chart is not None else (),
        title=f"narrow formats in {what.subject}",
    )


# Of a model -----------------------------------------------------------------------------------------------------------


def _of_model(what: WhatIf) -> tuple[dict[str, int], list[Table], Chart | None]:
    layers = {layer.module for loss in what.losses for layer in loss.layers}
    seen = {"linear layers": len(layers), "recipes": len(what.losses), "choices": len(what.front)}
    return seen, [_recipes_table(what), *_layer_tables(what), _front_table(what)], _chart(what) if what.front else None


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
    """Return what the errors are of: `gradients`, or `outputs` of a model that gives none."""
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
    """Return how many layers are in each format: `3 in 16 bits, 12 in nvfp4`."""
    counts = Counter(point.choice.get(module, "16 bits") for module in _weights(what))
    return ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))


def _weights(what: WhatIf) -> dict[str, int]:
    return {layer.module: layer.weights for loss in what.losses[:1] for layer in loss.layers}


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


# Of training ----------------------------------------------------------------------------------------------------------


def _of_training(what: TrainingWhatIf) -> tuple[dict[str, int], list[Table], Chart | None]:
    layers = {layer for loss in what.losses for layer in loss.layers}
    seen = {
        "linear layers": len(layers),
        "recipes": len({loss.recipe for loss in what.losses}),
        "steps": len(what.exact),
    }
    return seen, [_training_table(what)], _training_chart(what)


def _training_table(what: TrainingWhatIf) -> Table:
    columns = ("recipe", "last loss", "drift", "saturated", "flushed", "unmoved")
    rows: list[tuple[str | float, ...]] = [("float64", what.exact[-1], "", "", "", "")]
    for loss in (what.own, *what.losses):
        name = f"{loss.recipe} but for {', '.join(loss.kept)}" if loss.kept else loss.recipe
        interval = f" ({loss.drifts[0]:.3g} to {loss.drifts[1]:.3g})" if loss.drifts else ""
        parts = [f"{part:.1%}" if loss.layers else "" for *_, part in (loss.saturated, loss.flushed)]
        rows.append((name, loss.losses[-1], f"{loss.drift:.3g}{interval}", *parts, f"{loss.still:.1%}"))
    note = (
        "drift: distance of the weights from those of float64, over the way of these; saturated, flushed: the largest "
        "part of an operand; unmoved: weights that stand where they began, though float64 moved them"
    )
    return Table(f"Training, {len(what.exact)} steps", columns, tuple(rows), _DRIFT, note)


def _training_chart(what: TrainingWhatIf) -> Chart:
    runs = {"float64": what.exact} | {loss.recipe: loss.losses for loss in (what.own, *what.losses) if not loss.kept}
    series = []
    for name, losses in runs.items():
        steps = [step for step, value in enumerate(losses) if math.isfinite(value)]
        series.append(Series(name, tuple(map(float, steps)), tuple(losses[step] for step in steps)))
    return Chart("line", "Loss by step", "step", "loss", tuple(series), check=_DRIFT)
