"""The map of a model: where the values of each module and op lie, in order of execution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ampcheck.core.bands import bands_of
from ampcheck.core.formats import FORMATS, format_of_values
from ampcheck.core.limits import Limits
from ampcheck.core.run import ModelMap, Site, Where
from ampcheck.health import TensorHealth
from ampcheck.records import faults
from ampcheck.records.numerics import NumericsStats
from ampcheck.records.results import PRECISION
from ampcheck.shadow import Fault

SITES = 2000
"""Sites of one map; beyond it those nearest to the end of their format are kept."""

_PHASES = ("forward", "backward", "update")


def maps(stats: NumericsStats, limits: Limits) -> tuple[ModelMap, ...]:
    """The map of a run; none for a run of which no values were recorded."""
    by_place: dict[tuple[str, str], list[Site]] = {}
    for site in (*_modules(stats, limits), *_ops(stats, limits)):
        by_place.setdefault((site.module, site.phase), []).append(site)
    ordered = _in_order(module for module, _ in by_place)
    sites = [site for module in ordered for phase in _PHASES for site in by_place.get((module, phase), ())]
    if not sites:
        return ()
    notes = ["modules: samples of their results (forward) and of the gradients of their parameters (backward)"]
    if stats.scale != 1:
        notes.append(f"the loss scale of backward is {stats.scale:g}")
    if len(sites) > SITES:
        notes.append(f"{SITES:,} of {len(sites):,} sites: modules, damage, and ops nearest to the end of their format")
        kept = set(sorted(range(len(sites)), key=lambda index: _rank(sites[index]))[:SITES])
        sites = [site for index, site in enumerate(sites) if index in kept]
    names = ("float16", "bfloat16") if stats.format == "float16" else (stats.format,)
    bands = tuple(band for name in names for band in bands_of(FORMATS[name]))
    return (ModelMap(stats.name, tuple(sites), bands, "; ".join(notes)),)


def _modules(stats: NumericsStats, limits: Limits) -> Iterator[Site]:
    for (phase, module), health in stats.health.items():
        near = stats.closeness.get((phase, module))
        yield Site(
            phase,
            module,
            dtype=health.dtype,
            amax=health.amax or None,
            amin=health.amin if health.nonzero else None,
            nonfinite=health.nonfinite,
            flushed=near.flushed / near.sampled if near and near.sampled else None,
            error=near.error if near else None,
            limit=near.limit * limits.precision / PRECISION if near and near.limit is not None else None,
            first=health.histogram[0][0] if health.histogram else 0,
            bins=_bins(health),
        )


def _bins(health: TensorHealth) -> tuple[int, ...]:
    counts = dict(health.histogram or ())
    return tuple(counts.get(exponent, 0) for exponent in range(min(counts), max(counts) + 1)) if counts else ()


def _ops(stats: NumericsStats, limits: Limits) -> Iterator[Site]:
    sites = {
        (where, dtype): _op(where, dtype, amax=largest or None, inputs=inputs or None)
        for (where, dtype), (largest, inputs) in stats.largest.items()
    }
    for fault in stats.faults:
        if fault.kind not in (faults.MASK, faults.WRAP) and (fault.reaches or fault.kind == faults.OVERFLOW):
            key = fault.where, fault.dtype
            sites[key] = _damaged(sites.get(key, _op(*key)), fault, limits)
    yield from sites.values()


def _op(where: Where, dtype: str, amax: float | None = None, inputs: float | None = None) -> Site:
    return Site(where.phase, where.module, where.op, where.file, where.line, dtype, amax, inputs=inputs)


def _damaged(site: Site, fault: Fault, limits: Limits) -> Site:
    seen = fault.examination
    judged = bool(seen.limit) and not seen.lost
    return replace(
        site,
        amax=max(site.amax or 0.0, fault.amax_out) or None,
        inputs=fault.amax_in,
        exact=fault.exact_amax,
        nonfinite=site.nonfinite + seen.lost,
        flushed=seen.zeroed / seen.numel if seen.zeroed else site.flushed,
        error=seen.error if judged else site.error,
        limit=seen.limit * limits.precision / PRECISION if judged else site.limit,
        lost=f"{site.lost}, {fault.kind}" if site.lost else fault.kind,
    )


def _in_order(modules: Iterable[str]) -> list[str]:
    """Modules in the order in which they end, each after the modules that contain it: the order in which they begin."""
    given = dict.fromkeys(modules)
    ordered: dict[str, None] = {}
    for module in given:
        parts = module.split(".")
        for name in ("", *(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))):
            if name in given:
                ordered[name] = None
    return list(ordered)


def _rank(site: Site) -> tuple[bool, bool, float]:
    """Damage first, then modules, then ops by how near they come to the end of their format."""
    top = format_of_values(site.dtype).max if site.op else math.inf
    return not site.lost, bool(site.op), -(site.amax or 0.0) / top
