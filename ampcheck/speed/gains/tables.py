"""The tables of what torch.compile and autocast are worth: by model, by family, and over all models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ampcheck.core.run import Run, Scalar, Table
from ampcheck.speed.gains.measure import FIGURES, GAINS
from ampcheck.speed.verdict import bootstrapped

_WAYS = ("whole", "with breaks", "not")

_WIDEST = 2.0
"""The quotient of the ends of an interval beyond which a gain says nothing about its model."""

Figures = Mapping[str, Scalar]


def figures_of(run: Run) -> Figures:
    """The row of figures of a model; empty where its compilation was not measured."""
    for table in run.tables:
        if table.title == FIGURES:
            return dict(zip(table.columns, table.rows[0], strict=True))
    return {}


def gain_tables(models: Sequence[tuple[str, str, Figures]]) -> list[Table]:
    """The tables of models, each with its name, its family and its figures; none without any."""
    measured = [(name, family, figures) for name, family, figures in models if figures]
    if not measured:
        return []
    columns = tuple(measured[0][2])
    rows = [(name, *(figures.get(column) for column in columns)) for name, _, figures in measured]
    note = (
        "Times as fast, the median of paired ratios with the ends of its interval at 95 %: compiled as against eager "
        "code, in float32 and in bfloat16; bfloat16 autocast as against float32 in eager mode, and both together. "
        "Errors are the largest relative ones of an output against float64; seconds of compilation those beyond an "
        "eager start, with empty caches and with full ones; peaks those of one float32 step beyond its beginning."
    )
    tables = [Table(FIGURES, ("target", *columns), rows, note=note)]
    families: dict[str, list[Figures]] = {}
    for _, family, figures in measured:
        families.setdefault(family, []).append(figures)
    if any(families):
        tables.append(_by_family(families))
    return [*tables, _over_all([figures for *_, figures in measured])]


def _by_family(families: Mapping[str, Sequence[Figures]]) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for family, members in sorted(families.items()):
        ways = [figures["compiles"] for figures in members]
        means = (_geometric_mean(_logs(members, gain)) for gain in GAINS)
        rows.append((family or "none", len(members), *map(ways.count, _WAYS), *means))
    columns = ("family", "models", "compile whole", "with breaks", "not", *GAINS)
    return Table("Compilation by family", columns, rows, note="Gains are geometric means, times as fast.")


def _over_all(models: Sequence[Figures]) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for gain in GAINS:
        known = [interval for figures in models if (interval := _interval(figures, gain)) is not None]
        logs = _logs(models, gain)
        low = high = None
        if len(logs) > 1:
            low, high = (round(float(np.exp(end)), 4) for end in bootstrapped(np.mean, logs))
        faster, slower = (sum(low > 1 for _, low, _ in known), sum(high < 1 for *_, high in known))
        if known:
            rows.append((gain, len(logs), _geometric_mean(logs), low, high, faster, slower, len(known) - len(logs)))
    columns = ("gain", "models", "times as fast", "from", "to", "surely faster", "surely slower", "too noisy")
    compiled = sum(figures["compiles"] != "not" for figures in models)
    note = (
        f"Geometric means, with an interval at 95 % over models; surely: the interval of a model excludes 1. Left out "
        f"are models whose numbers are wrong, and as too noisy those whose interval spans more than a factor of "
        f"{_WIDEST:g}. {compiled:,} of {len(models):,} models compile."
    )
    return Table("Geometric means", columns, rows, note=note)


def _logs(models: Sequence[Figures], gain: str) -> NDArray[np.float64]:
    """The logarithms of the gains that are known well enough."""
    known = [interval for figures in models if (interval := _interval(figures, gain)) is not None]
    return np.log([middle for middle, low, high in known if high <= _WIDEST * low])


def _interval(figures: Figures, gain: str) -> tuple[float, float, float] | None:
    """A gain and the ends of its interval; None where it was not measured."""
    middle, low, high = (figures[f"{gain}{end}"] for end in ("", " low", " high"))
    if not (isinstance(middle, (int, float)) and isinstance(low, (int, float)) and isinstance(high, (int, float))):
        return None
    return float(middle), float(low), float(high)


def _geometric_mean(logs: NDArray[np.float64]) -> float | None:
    return round(float(np.exp(np.mean(logs))), 4) if len(logs) else None
