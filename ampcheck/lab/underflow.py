"""Gradients that become zero: magnitudes cast with and without a loss scale, and a real backward pass in float16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from ampcheck.core.formats import format_of
from ampcheck.core.progress import Progress, silent
from ampcheck.core.run import Chart, Coverage, Finding, Run, Scalar, Series, Table
from ampcheck.health import TensorHealth, health_of
from ampcheck.lab.expectations import Expectations, bands_of, lacks, power
from ampcheck.lab.registry import check_of

CHECK = check_of("underflow")

SCALE = 2.0**13
COUNT = 200_000
LOWEST, HIGHEST = 1e-12, 1.0
FORMATS = ("float16", "bfloat16")
LAYERS = 8


@dataclass(frozen=True, slots=True)
class CastStats:
    """Magnitudes multiplied by `scale` and cast to `format`. zeros: that became zero, subnormal: that became
    subnormal, as the device cast them; expected: as many as lie at or below the format's threshold."""

    format: str
    scale: float
    zeros: int
    expected: int
    subnormal: int
    count: int


@dataclass(frozen=True, slots=True)
class LayerStats:
    """The weight gradient of one layer of a float16 net: of the elements that are nonzero in float64 those that are
    zero without and with the loss scale; what scaling made infinite; the median magnitude in float64."""

    name: str
    nonzero: int
    plain: int
    scaled: int
    infinite: int
    typical: float


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
    given = magnitudes()
    casts, histograms, lacking = [], {}, {}
    for scale in (1.0, SCALE):
        scaled = given * scale  # a power of two: exact
        label = "as they are" if scale == 1 else f"times {power(scale)}"
        health = health_of(scaled, histogram=True)
        assert isinstance(health, TensorHealth)
        histograms[label] = health.histogram or ()
        for name in FORMATS:
            if why := lacks(name, device):
                lacking[name] = why
                continue
            form = format_of(name)
            cast = scaled.to(device).to(getattr(torch, name)).cpu()
            expected = int((scaled.double() <= form.flushes_at).sum())
            size = cast.double().abs()
            subnormal = int(((size > 0) & (size < form.smallest_normal)).sum())
            casts.append(CastStats(name, scale, int((cast == 0).sum()), expected, subnormal, len(given)))
    layers = () if "float16" in lacking else _backward(device)
    return UnderflowStats(device, tuple(casts), histograms, layers, lacking)


class Deep(nn.Sequential):
    """Linear layers of small weights with tanh between them: gradients shrink towards the input."""

    def __init__(self, width: int = 32) -> None:
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(width, width), nn.Tanh()]
        super().__init__(*layers[:-1])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.4)


def _backward(device: str) -> tuple[LayerStats, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Deep().half()  # the float64 twin starts from the rounded weights
        x, y = torch.randn(64, 32).half(), (0.1 * torch.randn(64, 32)).half()
    wide = _gradients(net, x, y, torch.float64, "cpu", 1.0)
    plain = _gradients(net, x, y, torch.float16, device, 1.0)
    scaled = _gradients(net, x, y, torch.float16, device, SCALE)
    found = []
    for name, exact in wide.items():
        if name.endswith("weight"):
            alive = exact != 0
            layer = LayerStats(
                name.partition(".")[0],
                int(alive.sum()),
                int((plain[name][alive] == 0).sum()),
                int((scaled[name][alive] == 0).sum()),
                int((~scaled[name].isfinite()).sum()),
                float(exact.abs().median()),
            )
            found.append(layer)
    return tuple(found)


def _gradients(
    net: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype, device: str, scale: float
) -> dict[str, Tensor]:
    twin = Deep().to(device, dtype)
    twin.load_state_dict(net.state_dict())
    loss = (twin(x.to(device, dtype)) - y.to(device, dtype)).square().mean()
    (loss * scale).backward()
    return {name: p.grad.cpu() for name, p in twin.named_parameters() if p.grad is not None}


def check_underflow(stats: UnderflowStats) -> list[Finding]:
    """As many become zero as lie at or below the threshold of the format, and a scale saves those of the net."""
    lab = Expectations(CHECK, stats.device)
    for cast in stats.casts:
        form = format_of(cast.format)
        where = "" if cast.scale == 1 else f", scaled by {power(cast.scale)},"
        expected = (
            f"of {cast.count:,} magnitudes from {LOWEST:g} to {HIGHEST:g}{where} those at or below "
            f"{power(form.flushes_at / cast.scale)} become zero in {cast.format}: {cast.expected:,} "
            f"({100 * expected_share(cast.format, cast.scale):.1f} % of all log-uniform ones)"
        )
        found = f"{cast.zeros:,} zeros"
        right = cast.zeros == cast.expected
        observed, limit = float(cast.zeros), float(cast.expected)
        lab.expect(expected, found, right, seen=cast.count, observed=observed, limit=limit, unit="zeros")
    if stats.layers:
        nonzero = sum(layer.nonzero for layer in stats.layers)
        plain, scaled = (sum(getattr(layer, what) for layer in stats.layers) for what in ("plain", "scaled"))
        lab.expect(
            f"a backward pass in float16 loses fewer gradients with a loss scale of {power(SCALE)} than without",
            f"of {nonzero:,} that are nonzero in float64 {plain:,} are zero without, "
            f"{100 * plain / nonzero:.1f} %, {scaled:,} with it, and "
            f"{sum(layer.infinite for layer in stats.layers)} are infinite",
            scaled < plain and not any(layer.infinite for layer in stats.layers),
            seen=nonzero,
        )
    for why in stats.lacking.values():
        lab.skip(why)
    return lab.findings


def expected_share(name: str, scale: float) -> float:
    """The part of log-uniform magnitudes from `LOWEST` to `HIGHEST` that a format takes to zero after scaling."""
    edge = Fraction(format_of(name).flushes_at) / Fraction(scale)
    share = math.log(edge / Fraction(LOWEST)) / math.log(HIGHEST / LOWEST)
    return min(1.0, max(0.0, share))


def run(*, device: str = "cpu", full: bool = False, progress: Progress = silent) -> Run:
    """Tables of what is lost, a histogram of magnitudes and a chart of a net's layers."""
    progress("magnitudes and a backward pass", 0, 1)
    stats = measure_underflow(device)
    charts = (histogram_chart(stats), *([_layers_chart(stats)] if stats.layers else []))
    return Run(
        findings=tuple(check_underflow(stats)),
        coverage=Coverage(
            {"magnitudes": COUNT, "gradients": sum(layer.nonzero for layer in stats.layers)},
            dict.fromkeys(stats.lacking.values(), 1),
        ),
        tables=(_casts(stats), *([_layers(stats)] if stats.layers else [])),
        charts=charts,
    )


def histogram_chart(stats: UnderflowStats) -> Chart:
    """How many magnitudes lie in each binade, against the range of float16."""
    series = []
    for label, held in stats.histograms.items():
        first, last = held[0][0], held[-1][0]
        counts = dict(held)
        edges = [float(edge) for edge in range(first, last + 2)]
        series.append(Series(label, edges, [float(counts.get(edge, 0)) for edge in range(first, last + 1)]))
    edge = power(format_of("float16").flushes_at)
    lowest = min(held[0][0] for held in stats.histograms.values())
    more = lowest - round(math.log2(format_of("bfloat16").smallest_subnormal))
    return Chart(
        "histogram",
        f"Magnitudes, as they are and scaled by {power(SCALE)}",
        "magnitude",
        "magnitudes in a power of two",
        series=series,
        bands=bands_of("float16"),
        check=CHECK.slug,
        note=f"What lies at or below {edge}, half of the smallest subnormal, becomes zero in float16. bfloat16 holds "
        f"all of these and {more} powers of two more below them.",
    )


def _layers_chart(stats: UnderflowStats) -> Chart:
    depth = [float(number) for number in range(1, len(stats.layers) + 1)]
    lines = {"without a loss scale": "plain", f"scaled by {power(SCALE)}": "scaled"}
    series = [
        Series(label, depth, [100 * getattr(layer, name) / max(layer.nonzero, 1) for layer in stats.layers])
        for label, name in lines.items()
    ]
    return Chart(
        "line",
        "Weight gradients that are zero in float16 and not in float64",
        "layer, counted from the input",
        "zeros, %",
        series=series,
        check=CHECK.slug,
        note=f"{LAYERS} linear layers with tanh between them, weights in float16; gradients shrink on their way back.",
        y_scale="linear",
    )


def _casts(stats: UnderflowStats) -> Table:
    rows: list[tuple[Scalar, ...]] = [
        (
            cast.format,
            power(cast.scale),
            f"{100 * cast.zeros / cast.count:.2f}",
            f"{100 * expected_share(cast.format, cast.scale):.2f}",
            f"{100 * cast.subnormal / cast.count:.2f}",
        )
        for cast in stats.casts
    ]
    return Table(
        f"{COUNT:,} magnitudes from {LOWEST:g} to {HIGHEST:g}",
        ("format", "scale", "zeros, %", "expected, %", "subnormal, %"),
        rows,
        check=CHECK.slug,
        note="Log-uniform. Expected: from the threshold of the format; with so many magnitudes chance moves it by 0.1 "
        "points.",
    )


def _layers(stats: UnderflowStats) -> Table:
    rows: list[tuple[Scalar, ...]] = [
        (int(layer.name) // 2 + 1, f"{layer.typical:.2g}", layer.nonzero, layer.plain, layer.scaled, layer.infinite)
        for layer in stats.layers
    ]
    return Table(
        "A backward pass in float16",
        ("layer", "median magnitude", "nonzero in float64", "zero, unscaled", "zero, scaled", "infinite, scaled"),
        rows,
        check=CHECK.slug,
    )
