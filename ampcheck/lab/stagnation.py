"""Two thousand updates of 1e-5 on a weight of 1, in each format and with each cure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ampcheck.core.formats import format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Coverage, Finding, Run, Series, Table
from ampcheck.lab.expectations import ARITHMETIC, Expectations, lacks
from ampcheck.lab.registry import check_of
from ampcheck.training.stagnation.cures import AS_IS, KAHAN, STOCHASTIC, round_stochastically

CHECK = check_of("stagnation")

START, UPDATE, STEPS = 1.0, 1e-5, 2000
MASTER = "float32 master weight"
REPLICATES = 64
EVERY = 20
"""Steps between two points of a chart."""

Path: TypeAlias = "tuple[float, ...]"
"""The weight at the start and after each `EVERY` steps."""


@dataclass(frozen=True, slots=True)
class StagnationStats:
    """paths: by format and way; of stochastic rounding the mean of `REPLICATES` weights. spread: of these at the end,
    the standard deviation."""

    device: str
    paths: Mapping[tuple[str, str], Path]
    spread: Mapping[str, float]
    lacking: Mapping[str, str]


def measure_stagnation(device: str = "cpu") -> StagnationStats:
    """Update the weight step by step in the device's own arithmetic."""
    paths: dict[tuple[str, str], Path] = {}
    spread, lacking = {}, {}
    for name in ARITHMETIC:
        if why := lacks(name, device):
            lacking[name] = why
            continue
        dtype = getattr(torch, name)
        paths[name, AS_IS] = _walk(_as_is(dtype, device))
        if name != "float32":
            paths[name, MASTER] = _walk(_master(dtype, device))
            paths[name, KAHAN] = _walk(_kahan(dtype, device))
            weights = _stochastic(name)
            paths[name, STOCHASTIC] = _walk(weights)
            spread[name] = float(weights().std())
    return StagnationStats(device, paths, spread, lacking)


def _walk(step: Callable[[], Tensor]) -> Path:
    found = [START]
    for number in range(1, STEPS + 1):
        weight = step()
        if number % EVERY == 0:
            found.append(float(weight.cpu().double().mean()))
    return tuple(found)


def _as_is(dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    weight = torch.full((1,), START, dtype=dtype, device=device)
    return lambda: weight.add_(UPDATE)


def _master(dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    """The update goes to a float32 copy; the weight in use is that copy, rounded."""
    master = torch.full((1,), START, dtype=torch.float32, device=device)
    return lambda: master.add_(UPDATE).to(dtype)


def _kahan(dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    """What a rounding took off is kept in the same format and added with the next update (Kahan, 1965)."""
    weight = torch.full((1,), START, dtype=dtype, device=device)
    update = torch.full((1,), UPDATE, dtype=dtype, device=device)
    missing = torch.zeros_like(weight)

    def step() -> Tensor:
        wanted = update + missing
        reached = weight + wanted
        missing.copy_(wanted - (reached - weight))
        return weight.copy_(reached)

    return step


def _stochastic(name: str) -> Callable[[], Tensor]:
    """Rounded up as often as the value lies near the upper neighbour. On the CPU, since it emulates what no device has
    as a rounding mode."""
    form = format_of(name)
    generator = torch.Generator().manual_seed(0)
    weight = torch.full((REPLICATES,), START, dtype=torch.float64)
    return lambda: weight.copy_(round_stochastically(weight + UPDATE, form, generator))


def check_stagnation(stats: StagnationStats) -> list[Finding]:
    """An update of at most half an ULP changes nothing; a cure brings it where it should be."""
    lab = Expectations(CHECK, stats.device)
    true = START + STEPS * UPDATE
    for (name, way), path in stats.paths.items():
        form = format_of(name)
        half = form.ulp(START) / 2
        if way == AS_IS and half >= UPDATE:
            expected = f"{name} does not move, as {UPDATE:g} is at most half of the spacing at {START:g}, {half:.3g}"
            holds = path[-1] == START
        elif way == KAHAN and form.ulp(half) / 2 >= UPDATE:
            expected = (
                f"{name}, {way}, does not move either: what is kept, itself in {name}, stops at {half:.3g}, half of "
                f"the weight's spacing, where {UPDATE:g} is again at most half of the spacing, {form.ulp(half) / 2:.3g}"
            )
            holds = path[-1] == START
        else:
            far = tolerance(name, way)
            expected = f"{name}, {way}, ends within {far:.2g} of {true:g}"
            holds = abs(path[-1] - true) <= far
        found, last = f"{path[-1]:.7g} after {STEPS:,} updates", path[-1]
        lab.expect(expected, found, holds, seen=len(path) - 1, observed=last, limit=true)
    for why in stats.lacking.values():
        lab.skip(why)
    return lab.findings


def tolerance(name: str, way: str) -> float:
    """How far from the true weight a way may end: what its roundings add up to at most.

    As it is, and with a master weight: each of the steps rounds by half an ULP of float32; a master weight is rounded
    once more for use. Kahan: what is kept stays below an ULP of the weight, the update itself is rounded to the format,
    and so is what is kept, to half of its own spacing in each step.
    Stochastic rounding moves by an ULP with a chance of update / ULP, so that the variance of the sum is at most
    steps * update * ULP; the mean of the replicates lies within five of its standard deviations, but for one case in a
    million.
    """
    ulp, wide = format_of(name).ulp(START), format_of("float32").ulp(START)
    if way == STOCHASTIC:
        return 5 * math.sqrt(STEPS * UPDATE * ulp / REPLICATES)
    if way == KAHAN:
        form = format_of(name)
        return ulp + STEPS * (form.ulp(UPDATE) / 2 + form.ulp(ulp / 2) / 2)
    return STEPS * wide / 2 + (ulp / 2 if way == MASTER else 0.0)


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """A table of where the weight ends and a chart of its way there."""
    progress(f"{STEPS:,} updates", 0, 1)
    stats = measure_stagnation(device)
    return Run(
        findings=tuple(check_stagnation(stats)),
        coverage=Coverage({"updates": STEPS * len(stats.paths)}, dict.fromkeys(stats.lacking.values(), 1)),
        tables=(_ends(stats),),
        charts=tuple(stagnation_chart(stats, name) for name in ARITHMETIC if (name, KAHAN) in stats.paths),
    )


def stagnation_chart(stats: StagnationStats, name: str) -> Chart:
    """The weight over the updates in one format, beside float32."""
    x = [float(number) for number in range(0, STEPS + 1, EVERY)]
    series = [
        Series("float32" if own == "float32" else way, x, path)
        for (own, way), path in stats.paths.items()
        if own in ("float32", name)
    ]
    spacing = format_of(name).ulp(START)
    hidden = stats.paths[name, KAHAN] == stats.paths[name, AS_IS]
    return Chart(
        "line",
        f"{STEPS:,} updates of {UPDATE:g} on a {name} weight of {START:g}",
        "updates",
        "weight",
        series=series,
        check=CHECK.slug,
        note=f"Above {START:g} the numbers of {name} are {spacing:.3g} apart. Of stochastic rounding the mean of "
        f"{REPLICATES} weights is shown."
        + (" Kahan summation lies on the line of what does not move." if hidden else ""),
    )


def _ends(stats: StagnationStats) -> Table:
    true = START + STEPS * UPDATE
    rows = [
        (name, way, f"{path[-1]:.7g}", f"{100 * (path[-1] - START) / (true - START):.1f}", stats.spread.get(name))
        if way == STOCHASTIC
        else (name, way, f"{path[-1]:.7g}", f"{100 * (path[-1] - START) / (true - START):.1f}", None)
        for (name, way), path in stats.paths.items()
    ]
    return Table(
        f"{STEPS:,} updates of {UPDATE:g} on a weight of {START:g}",
        ("format", "way", "ends at", "arrived, %", "standard deviation"),
        rows,
        check=CHECK.slug,
        note=f"In exact arithmetic it ends at {true:g}. A master weight is shown as it is used, rounded to the "
        f"format. Of stochastic rounding: mean and spread of {REPLICATES} weights.",
    )
