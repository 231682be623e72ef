"""Two thousand updates of 1e-5 on a weight of 1, in each format and with each cure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ampcheck.core.formats import FloatFormat, format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Finding, Run, Series, Table
from ampcheck.tools.lab.lab import ARITHMETIC, Expectations, run_of, usable
from ampcheck.torchtools.spacing import spacing

START, UPDATE, STEPS = 1.0, 1e-5, 2000
END = START + STEPS * UPDATE
MASTER = "float32 master weight"
UNCURED, KAHAN, STOCHASTIC = "without a cure", "Kahan summation", "stochastic rounding"
REPLICATES = 64
EVERY = 20
"""Steps between two points of a chart."""


@dataclass(frozen=True, slots=True)
class StagnationStats:
    """paths: by format and cure the weight at the start and after each `EVERY` steps; of stochastic rounding the mean
    of `REPLICATES` weights. spread: of these at the end, the standard deviation."""

    device: str
    paths: Mapping[tuple[str, str], tuple[float, ...]]
    spread: Mapping[str, float]
    lacking: Mapping[str, str]


def measure_stagnation(device: str = "cpu") -> StagnationStats:
    """Update the weight step by step in the device's own arithmetic."""
    paths: dict[tuple[str, str], tuple[float, ...]] = {}
    spread = {}
    dtypes, lacking = usable(ARITHMETIC, device)
    for name, dtype in dtypes.items():
        for cure in (UNCURED, MASTER, KAHAN, STOCHASTIC) if name != "float32" else (UNCURED,):
            weights = list(_weights(name, cure, dtype, device))[EVERY - 1 :: EVERY]
            paths[name, cure] = (START, *(float(weight.cpu().double().mean()) for weight in weights))
            if cure == STOCHASTIC:
                spread[name] = float(weights[-1].std())
    return StagnationStats(device, paths, spread, lacking)


def _weights(name: str, cure: str, dtype: torch.dtype, device: str) -> Iterator[Tensor]:
    """The weight after each step.

    A master weight is float32, rounded for use. Kahan summation (Kahan, 1965) stores the rounding error in the same
    format and adds it to the next update. Stochastic rounding is emulated on the CPU: no device has it.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.full((1,), START, dtype=torch.float32 if cure == MASTER else dtype, device=device)
    update = torch.full_like(weight, UPDATE)
    error = torch.zeros_like(weight)
    if cure == STOCHASTIC:
        weight = torch.full((REPLICATES,), START, dtype=torch.float64)
    for _ in range(STEPS):
        if cure == KAHAN:
            corrected = update + error
            rounded = weight + corrected
            error, weight = corrected - (rounded - weight), rounded
        elif cure == STOCHASTIC:
            weight = round_stochastically(weight + UPDATE, format_of(name), generator)
        else:
            weight = weight + UPDATE
        yield weight.to(dtype) if cure == MASTER else weight


def round_stochastically(values: Tensor, form: FloatFormat, generator: torch.Generator) -> Tensor:
    """Round float64 `values` to one of the two neighbours in a format, the nearer the likelier, right on average."""
    step = spacing(values, form)
    chance = torch.rand(values.shape, generator=generator, dtype=torch.float64)
    return (torch.floor(values / step + chance) * step).clamp(-form.max, form.max)


def check_stagnation(stats: StagnationStats) -> list[Finding]:
    """An update of at most half an ULP changes nothing; a cure brings the weight to its exact end."""
    lab = Expectations("stagnation", stats.device)
    for (name, cure), path in stats.paths.items():
        form = format_of(name)
        half = form.ulp(START) / 2
        holds = path[-1] == START
        if cure == UNCURED and half >= UPDATE:
            expected = f"{name} does not move, as {UPDATE:g} is at most half of the spacing at {START:g}, {half:.3g}"
        elif cure == KAHAN and form.ulp(half) / 2 >= UPDATE:
            expected = (
                f"{name}, {cure}, does not move either: the stored error, itself in {name}, stops at {half:.3g}, half "
                f"of the weight's spacing, where {UPDATE:g} is again at most half of the spacing, "
                f"{form.ulp(half) / 2:.3g}"
            )
        else:
            far = tolerance(name, cure)
            expected = f"{name}, {cure}, ends within {far:.2g} of {END:g}"
            holds = abs(path[-1] - END) <= far
        outcome = f"{path[-1]:.7g} after {STEPS:,} updates"
        lab.expect(expected, outcome, holds, seen=len(path) - 1, observed=path[-1], limit=END)
    lab.skip(*stats.lacking.values())
    return lab.findings


def tolerance(name: str, cure: str) -> float:
    """The largest distance from the exact end: the sum of all roundings.

    As it is, and with a master weight: each of the steps rounds by half an ULP of float32; a master weight is rounded
    once more for use. Kahan: the stored error stays below an ULP of the weight; the update is rounded to the format,
    and so is the stored error, to half of its own spacing in each step.
    Stochastic rounding moves by an ULP with a chance of update / ULP, so that the variance of the sum is at most
    steps * update * ULP; the mean of the replicates is within five of its standard deviations, except for one case in a
    million.
    """
    form = format_of(name)
    ulp, wide = form.ulp(START), format_of("float32").ulp(START)
    if cure == STOCHASTIC:
        return 5 * math.sqrt(STEPS * UPDATE * ulp / REPLICATES)
    if cure == KAHAN:
        return ulp + STEPS * (form.ulp(UPDATE) / 2 + form.ulp(ulp / 2) / 2)
    return STEPS * wide / 2 + (ulp / 2 if cure == MASTER else 0.0)


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """A table of the last weights and charts of their paths."""
    progress(f"{STEPS:,} updates", 0, 1)
    stats = measure_stagnation(device)
    rows = []
    for (name, cure), path in stats.paths.items():
        spread = stats.spread.get(name) if cure == STOCHASTIC else None
        rows.append((name, cure, f"{path[-1]:.7g}", f"{100 * (path[-1] - START) / (END - START):.1f}", spread))
    note = (
        f"In exact arithmetic it ends at {END:g}. A master weight is shown rounded to the format. Stochastic rounding: "
        f"mean and spread of {REPLICATES} weights."
    )
    columns = ("format", "cure", "ends at", "arrived, %", "standard deviation")
    title = f"{STEPS:,} updates of {UPDATE:g} on a weight of {START:g}"
    ends = Table(title, columns, rows, note=note)
    charts = [stagnation_chart(stats, name) for name in ARITHMETIC if (name, KAHAN) in stats.paths]
    seen = {"updates": STEPS * len(stats.paths)}
    return run_of(check_stagnation(stats), seen, tables=[ends], charts=charts)


def stagnation_chart(stats: StagnationStats, name: str) -> Chart:
    """The weight over the updates in one format and in float32."""
    x = [float(number) for number in range(0, STEPS + 1, EVERY)]
    series = [
        Series("float32" if own == "float32" else cure, x, path)
        for (own, cure), path in stats.paths.items()
        if own in ("float32", name)
    ]
    hidden = stats.paths[name, KAHAN] == stats.paths[name, UNCURED]
    note = (
        f"Above {START:g} the numbers of {name} are {format_of(name).ulp(START):.3g} apart. Stochastic rounding: the "
        f"mean of {REPLICATES} weights."
    )
    note += " Kahan summation coincides with the weight that does not move." if hidden else ""
    title = f"{STEPS:,} updates of {UPDATE:g} on a {name} weight of {START:g}"
    return Chart("line", title, "updates", "weight", series, note=note)
