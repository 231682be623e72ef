"""Gradients that become zero: magnitudes cast with and without a loss scale, and a real backward pass in float16."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from ampcheck.core.bands import bands_of
from ampcheck.core.formats import format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Finding, Run, Series, Table
from ampcheck.health import TensorHealth, health_of
from ampcheck.tools.lab.lab import Expectations, power, run_of, usable

SCALE = 2.0**13
COUNT = 200_000
LOWEST, HIGHEST = 1e-12, 1.0
LAYERS = 8

_MAGNITUDES = f"{COUNT:,} magnitudes from {LOWEST:g} to {HIGHEST:g}"


@dataclass(frozen=True, slots=True)
class CastStats:
    """Magnitudes multiplied by `scale` and cast to `format`. zeros, subnormal: how many became zero or subnormal on the
    device; expected: how many are at or below the format's threshold."""

    format: str
    scale: float
    zeros: int
    expected: int
    subnormal: int


@dataclass(frozen=True, slots=True)
class LayerStats:
    """The weight gradient of one layer of a float16 net: how many elements are nonzero in float64 and how many of these
    are zero without and with the loss scale; how many scaling made infinite; the median magnitude in float64."""

    nonzero: int
    plain: int
    scaled: int
    infinite: int
    median: float


@dataclass(frozen=True, slots=True)
class UnderflowStats:
    """histograms: of the magnitudes by binade, unscaled and scaled."""

    device: str
    casts: tuple[CastStats, ...]
    histograms: Mapping[str, tuple[tuple[int, int], ...]]
    layers: tuple[LayerStats, ...]
    lacking: Mapping[str, str]


def magnitudes(count: int = COUNT, *, seed: int = 0) -> Tensor:
    """Log-uniform magnitudes from 1e-12 to 1, float32 [count], on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    return (math.log(LOWEST) + share * (math.log(HIGHEST) - math.log(LOWEST))).exp().float()


def measure_underflow(device: str = "cpu") -> UnderflowStats:
    """Cast magnitudes on the device, and run a float16 net backward there and in float64 on the CPU."""
    values = magnitudes()
    casts, histograms = [], {}
    dtypes, lacking = usable(("float16", "bfloat16"), device)
    for scale in (1.0, SCALE):
        scaled = values * scale  # a power of two: exact
        health = health_of(scaled, histogram=True)
        assert isinstance(health, TensorHealth)
        histograms["unscaled" if scale == 1 else f"times {power(scale)}"] = health.histogram or ()
        for name, dtype in dtypes.items():
            form = format_of(name)
            cast = scaled.to(device).to(dtype).cpu()
            expected = int((scaled.double() <= form.flushes_at).sum())
            size = cast.double().abs()
            subnormal = int(((size > 0) & (size < form.smallest_normal)).sum())
            casts.append(CastStats(name, scale, int((cast == 0).sum()), expected, subnormal))
    layers = () if "float16" in lacking else _backward(device)
    return UnderflowStats(device, tuple(casts), histograms, layers, lacking)


def _backward(device: str) -> tuple[LayerStats, ...]:
    """Linear layers of small weights with tanh between them: gradients shrink towards the input."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        net = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(32, 32), nn.Tanh())))[:-1]
        for parameter in net.parameters():
            parameter.mul_(0.4)
        net = net.half()  # the float64 reference starts from the rounded weights
        x, y = torch.randn(64, 32).half(), (0.1 * torch.randn(64, 32)).half()

    def gradients(dtype: torch.dtype, where: str, scale: float) -> list[Tensor]:
        model = copy.deepcopy(net).to(where, dtype)
        loss = (model(x.to(where, dtype)) - y.to(where, dtype)).square().mean()
        (loss * scale).backward()
        return [p.grad.cpu() for name, p in model.named_parameters() if name.endswith("weight") and p.grad is not None]

    exact_gradients = gradients(torch.float64, "cpu", 1.0)
    arms = (gradients(torch.float16, device, scale) for scale in (1.0, SCALE))
    layers = []
    for exact, plain, scaled in zip(exact_gradients, *arms, strict=True):
        nonzero, infinite, median = exact != 0, ~scaled.isfinite(), float(exact.abs().median())
        masks = (nonzero, nonzero & (plain == 0), nonzero & (scaled == 0), infinite)
        alive, lost, missed, overflowed = (int(mask.sum()) for mask in masks)
        layers.append(LayerStats(alive, lost, missed, overflowed, median))
    return tuple(layers)


def check_underflow(stats: UnderflowStats) -> list[Finding]:
    """As many become zero as are at or below the threshold of the format, and a scale rescues those of the net."""
    lab = Expectations("underflow", stats.device)
    for cast in stats.casts:
        expected = (
            f"of {_MAGNITUDES}{'' if cast.scale == 1 else f', scaled by {power(cast.scale)},'} those at or below "
            f"{power(format_of(cast.format).flushes_at / cast.scale)} become zero in {cast.format}: "
            f"{cast.expected:,} ({100 * expected_share(cast.format, cast.scale):.1f} % of all log-uniform ones)"
        )
        zeros, limit = float(cast.zeros), float(cast.expected)
        outcome, right = f"{cast.zeros:,} zeros", cast.zeros == cast.expected
        lab.expect(expected, outcome, right, seen=COUNT, observed=zeros, limit=limit, unit="zeros")
    if stats.layers:
        counts = [(layer.nonzero, layer.plain, layer.scaled, layer.infinite) for layer in stats.layers]
        nonzero, plain, scaled, infinite = map(sum, zip(*counts, strict=True))
        expected = f"a backward pass in float16 loses fewer gradients with a loss scale of {power(SCALE)} than without"
        outcome = (
            f"of {nonzero:,} that are nonzero in float64 {plain:,} are zero without, {100 * plain / nonzero:.1f} %, "
            f"{scaled:,} with it, and {infinite} are infinite"
        )
        lab.expect(expected, outcome, scaled < plain and not infinite, seen=nonzero)
    lab.skip(*stats.lacking.values())
    return lab.findings


def expected_share(name: str, scale: float) -> float:
    """The part of log-uniform magnitudes from `LOWEST` to `HIGHEST` that a format flushes to zero after scaling."""
    edge = Fraction(format_of(name).flushes_at) / Fraction(scale)
    share = math.log(edge / Fraction(LOWEST)) / math.log(HIGHEST / LOWEST)
    return min(1.0, max(0.0, share))


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of lost magnitudes and gradients, a histogram of magnitudes and a chart of a net's layers."""
    progress("magnitudes and a backward pass", 0, 1)
    stats = measure_underflow(device)
    tables, charts = [_casts(stats)], [histogram_chart(stats)]
    if stats.layers:
        table, chart = _layers(stats)
        tables.append(table)
        charts.append(chart)
    seen = {"magnitudes": COUNT, "gradients": sum(layer.nonzero for layer in stats.layers)}
    return run_of(check_underflow(stats), seen, tables=tables, charts=charts)


def histogram_chart(stats: UnderflowStats) -> Chart:
    """The number of magnitudes in each binade, with the range of float16."""
    series = []
    for label, histogram in stats.histograms.items():
        first, last, counts = histogram[0][0], histogram[-1][0], dict(histogram)
        edges = [float(edge) for edge in range(first, last + 2)]
        series.append(Series(label, edges, [float(counts.get(edge, 0)) for edge in range(first, last + 1)]))
    lowest = min(histogram[0][0] for histogram in stats.histograms.values())
    more = lowest - round(math.log2(format_of("bfloat16").smallest_subnormal))
    note = (
        f"Magnitudes at or below {power(format_of('float16').flushes_at)}, half of the smallest subnormal, become zero "
        f"in float16. bfloat16 has all of these and {more} powers of two more below them."
    )
    title, bands = f"Magnitudes, unscaled and scaled by {power(SCALE)}", bands_of(format_of("float16"))
    return Chart("histogram", title, "magnitude", "magnitudes in a power of two", series, bands, note=note)


def _casts(stats: UnderflowStats) -> Table:
    rows = []
    for cast in stats.casts:
        share = expected_share(cast.format, cast.scale)
        percents = (100 * cast.zeros / COUNT, 100 * share, 100 * cast.subnormal / COUNT)
        rows.append((cast.format, power(cast.scale), *(f"{percent:.2f}" for percent in percents)))
    columns = ("format", "scale", "zeros, %", "expected, %", "subnormal, %")
    note = "Log-uniform. Expected: from the threshold of the format. Chance moves the share by 0.1 points."
    return Table(_MAGNITUDES, columns, rows, note=note)


def _layers(stats: UnderflowStats) -> tuple[Table, Chart]:
    rows = [
        (number, f"{layer.median:.2g}", layer.nonzero, layer.plain, layer.scaled, layer.infinite)
        for number, layer in enumerate(stats.layers, 1)
    ]
    columns = ("layer", "median magnitude", "nonzero in float64", "zero, unscaled", "zero, scaled", "infinite, scaled")
    table = Table("A backward pass in float16", columns, rows)
    depth = [float(number) for number in range(1, len(stats.layers) + 1)]
    lines = {"without a loss scale": "plain", f"scaled by {power(SCALE)}": "scaled"}
    series = [
        Series(label, depth, [100 * getattr(layer, name) / max(layer.nonzero, 1) for layer in stats.layers])
        for label, name in lines.items()
    ]
    title = "Weight gradients that are zero in float16 and not in float64"
    note = f"{LAYERS} linear layers with tanh between them, weights in float16; gradients shrink on their way back."
    return table, Chart("line", title, "layer, counted from the input", "zeros, %", series, note=note, y_scale="linear")
