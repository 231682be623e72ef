"""The counts of a compiled graph are right: against bit patterns, and against the same graph run by eager kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from telemetry_models import batch, step
from torch import fx, nn

from ampcheck.telemetry.sites import Level, Site, select_sites
from ampcheck.telemetry.statistics import Layout, append_statistics, thresholds
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools import interception

ROWS = 1024
COUNTS = ("zeros", "flushed", "subnormals", "overflowed", "infs", "nans")


# One cast: every class, told by the bits that the cast leaves ---------------------------------------------------------


def rounded(bits: np.ndarray, name: str) -> np.ndarray:
    """The 16 bits to which float32 bits round, ties to even; by numpy, or by adding half a step to the bits."""
    if name == "float16":
        with np.errstate(over="ignore"):
            return bits.view(np.float32).astype(np.float16).view(np.uint16)
    half = (bits >> 16) & 1
    return ((bits.astype(np.uint64) + 0x7FFF + half) >> 16).astype(np.uint16)


def classes(bits: np.ndarray, name: str) -> dict[str, int]:
    """How many of these float32 patterns are of each class."""
    exponent, mantissa = (0x7C00, 0x03FF) if name == "float16" else (0x7F80, 0x007F)
    magnitude = bits & 0x7FFFFFFF
    nan, inf, zero = magnitude > 0x7F800000, magnitude == 0x7F800000, magnitude == 0
    after = rounded(np.where(nan, 0, bits).astype(np.uint32), name) & 0x7FFF
    finite = ~nan & ~inf & ~zero
    found = {
        "zeros": zero,
        "flushed": finite & (after == 0),
        "subnormals": finite & (after & exponent == 0) & (after & mantissa != 0),
        "overflowed": finite & (after == exponent),
        "infs": inf,
        "nans": nan,
    }
    return {name: int(which.sum()) for name, which in found.items()}


class Casts:
    """One compiled cast, and what it adds to the statistics at each call."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")
        self._telemetry = Telemetry()
        self._run = torch.compile(lambda x: x.to(dtype), dynamic=False)
        torch.compiler.reset()
        with self._telemetry.watching():
            self._run(torch.zeros(ROWS))
        self._telemetry.on = True
        self._before = dict.fromkeys(COUNTS, 0) | {"zeros": ROWS}

    def count(self, bits: np.ndarray) -> dict[str, int]:
        filled = np.zeros(ROWS, np.uint32)
        filled[: len(bits)] = bits
        self._run(torch.from_numpy(filled.view(np.int32)).view(torch.float32))
        (site,) = self._telemetry.read().sites
        now = {name: getattr(site, name) for name in COUNTS}
        found = {name: now[name] - self._before[name] for name in COUNTS}
        self._before = now
        return {**found, "zeros": found["zeros"] - (ROWS - len(bits))}


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def casts(request: pytest.FixtureRequest) -> Casts:
    return Casts(getattr(torch, request.param))


def test_every_class_is_counted_at_every_value_of_the_format_and_at_every_tie(casts: Casts) -> None:
    """Each value, the middle between it and the next, and the float32 neighbours of both."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    if casts.name == "float16":
        with np.errstate(invalid="ignore"):
            values = codes.view(np.float16).astype(np.float64)
            middles = (values[:-1] + values[1:]) / 2
            above = 65520.0  # the tie between the largest value and what would be the next
            exact = np.concatenate((values, middles, [above, -above])).astype(np.float32).view(np.uint32)
    else:
        exact = np.concatenate((codes.astype(np.uint32) << 16, (codes.astype(np.uint32) << 16) + 0x8000))
    patterns = np.concatenate((exact - 1, exact, exact + 1)).astype(np.uint32)

    for chunk in np.array_split(patterns, -(-len(patterns) // ROWS)):
        assert casts.count(chunk) == classes(chunk, casts.name)


@settings(max_examples=50)
@given(patterns=st.lists(st.integers(0, 2**32 - 1), max_size=ROWS))
def test_any_bits_are_counted_as_what_the_cast_makes_of_them(casts: Casts, patterns: list[int]) -> None:
    bits = np.array(patterns, np.uint32)
    assert casts.count(bits) == classes(bits, casts.name)


# Many sites: the compiled graph against the same graph in eager kernels -----------------------------------------------


class Chain(nn.Module):
    """Layers whose values lie low in float16, so that every threshold is near to some of them."""

    def __init__(self, depth: int = 12, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) + x
        return x


@dataclass(frozen=True)
class Compared:
    """One graph's statistics, compiled and eager, with the values that the eager kernels gave."""

    sites: tuple[Site, ...]
    layout: Layout
    compiled: list[float]
    eager: list[float]
    values: list[torch.Tensor]


class Recorded(fx.Interpreter):
    """Runs a graph by eager kernels and keeps what the sites gave."""

    def __init__(self, module: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
        super().__init__(module)
        self.kept = {node: torch.empty(0) for node in nodes}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.kept:
            self.kept[n] = value
        return value


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    found: list[Compared] = []

    def handler(lowered: interception.LoweredGraph) -> interception.Runnable:
        ours, eager = lowered.copied(), lowered.copied()
        for module in (ours, eager):
            sites = select_sites(module.graph, Level.CASTS, lowered.phase, lowered.sources)
            layout = append_statistics(module, sites)
        run, _ = lowered.variant(ours)

        def both(inputs: list[Any]) -> Sequence[Any]:
            recorded = Recorded(eager, list(sites))
            with torch.no_grad():
                expected = recorded.run(*inputs)[-1].tolist()
            outputs = run(inputs)
            values = [value.float() for value in recorded.kept.values()]
            found.append(Compared(tuple(sites.values()), layout, outputs[-1].tolist(), expected, values))
            return outputs[:-1]

        return both

    torch.compiler.reset()
    torch.manual_seed(0)
    model = torch.compile(Chain())
    with interception.intercepted(handler):
        step(model, batch(32, 16), dtype=torch.float16, scale=0.1)
    return found


def test_counts_of_the_compiled_graph_are_those_of_eager_kernels(compared: list[Compared]) -> None:
    """On every site: equal, up to elements whose eager value is so near to a threshold that rounding decides.

    A fused kernel keeps in float32 what an eager kernel rounds to float16 on the way. A value is then apart by at most
    a rounding for each op that was fused, of which no kernel here has more than eight, each of the size of the tensor's
    largest element at most, since what adds up to a small element may have been large. So only an element within 8
    unit roundoffs of the largest from a threshold may change sides.
    """
    sites, exact = 0, 0
    for graph in compared:
        differing = set()
        for (place, name), ours, eager in zip(graph.layout.entries, graph.compiled, graph.eager, strict=True):
            if name in ("amax", "smallest") or ours == eager:
                continue
            magnitude = graph.values[place].abs()
            limit = thresholds(graph.sites[place])[name]
            near = (magnitude - limit).abs() <= 8 * 2.0**-11 * magnitude.amax()
            assert abs(ours - eager) <= near.sum().item(), (graph.sites[place], name)
            differing.add(place)
        sites += len(graph.sites)
        exact += len(graph.sites) - len(differing)
    assert sites >= 100
    assert exact >= 0.9 * sites
    assert {site.at.phase for graph in compared for site in graph.sites} == {"forward", "backward"}


def test_the_planted_low_range_reaches_every_threshold(compared: list[Compared]) -> None:
    """The comparison above says something: elements of many sites flush or become subnormal."""
    inside = [
        count
        for graph in compared
        for (place, name), count in zip(graph.layout.entries, graph.compiled, strict=True)
        if name in ("lost", "tiny") and 0 < count < graph.values[place].numel()
    ]
    assert len(inside) >= 50


def test_the_largest_and_smallest_are_those_of_eager_kernels(compared: list[Compared]) -> None:
    for graph in compared:
        for (place, name), ours, eager in zip(graph.layout.entries, graph.compiled, graph.eager, strict=True):
            if name == "amax":
                assert ours == pytest.approx(eager, rel=8 * 2.0**-11), graph.sites[place]
