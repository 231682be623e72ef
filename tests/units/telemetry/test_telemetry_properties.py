"""What a measured compiled graph counts of drawn tensors is what eager kernels and numpy count of the same tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcheck.core.run import Where
from ampcheck.records.telemetry import SiteStats
from ampcheck.strategies import cancelling_pairs, heavy_tails, log_uniform, outlier_channels, tensors, values
from ampcheck.telemetry.accumulators import GraphAccumulators
from ampcheck.telemetry.telemetry import Telemetry

WIDTH = 8
ROWS = 6


class Compiled:
    """A cast, a product in 16 bits and a second cast, compiled once; then measured over any calls.

    rows: symbolic where `dynamic`, which is another way to count.
    """

    def __init__(self, low: torch.dtype, dynamic: bool) -> None:
        self.low, self.dynamic = low, dynamic

        def run(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            narrow = x.to(low)
            product = narrow @ weight
            return narrow, product, (product.float() * 2.0**-6).to(low)

        torch.compiler.reset()
        self._telemetry = Telemetry()
        self._run = torch.compile(run, dynamic=dynamic)
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator).mul(4).to(low)
        with self._telemetry.watching():
            self._run(torch.ones(ROWS, WIDTH), self.weight)
        (self._graph,) = self._telemetry._graphs

    def measured(self, many: Sequence[torch.Tensor]) -> tuple[list[SiteStats], list[tuple[torch.Tensor, ...]]]:
        """The statistics of these calls alone, and what each call gave."""
        before = self._graph.accumulators
        self._graph.accumulators = GraphAccumulators(before.sites, before.layout)
        self._graph.calls.clear()
        self._telemetry.on = True
        try:
            given_back = [self._run(x, self.weight) for x in many]
        finally:
            self._telemetry.on = False
        stats = self._telemetry.read()
        assert stats.measured == len(many), "a recompilation is not measured"
        return sorted(stats.sites, key=lambda site: site.order), given_back


@pytest.fixture(
    scope="module",
    params=[("bfloat16", True), ("float16", False)],
    ids=["bfloat16-symbolic", "float16-fixed"],
)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    return Compiled(getattr(torch, request.param[0]), request.param[1])


def counted(wide: torch.Tensor, low: torch.dtype, cast: bool) -> dict[str, Any]:
    """What one call says of one site, by numpy on float64. wide: the value before the cast."""
    info = torch.finfo(low)
    size = np.abs(wide.to(torch.float64).numpy())
    after = np.abs(wide.to(low).to(torch.float64).numpy())
    finite = np.isfinite(size)
    nonzero = finite & (size > 0)
    found: dict[str, Any] = {
        "calls": 1,
        "numel": size.size,
        "zeros": int((size == 0).sum()),
        "flushed": int((nonzero & (after == 0)).sum()),
        "subnormals": int((nonzero & (after > 0) & (after < info.tiny)).sum()),
        "overflowed": int((nonzero & np.isinf(after)).sum()),
        "infs": int(np.isinf(size).sum()),
        "nans": int(np.isnan(size).sum()),
        "amax": float(size[finite].max(initial=0.0)),
        "smallest": float(size[nonzero].min(initial=math.inf)),
    }
    found["bad"] = int(found["overflowed"] + found["infs"] + found["nans"] > 0)
    found["emptied"] = int(found["flushed"] > 0 and found["flushed"] + found["zeros"] == found["numel"])
    half = info.tiny * info.eps / 2  # of the smallest subnormal
    most = math.sqrt(found["flushed"]) * half / found["amax"] if found["amax"] else 0.0
    found["lost"] = min(1.0, most) if cast else 0.0
    return found


def together(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Several calls of one site as one record."""
    largest, smallest = ("amax", "lost"), ("smallest",)
    whole = {
        name: max(c[name] for c in calls)
        if name in largest
        else min(c[name] for c in calls)
        if name in smallest
        else sum(c[name] for c in calls)
        for name in calls[0]
    }
    bad = [place for place, call in enumerate(calls) if call["bad"]]
    return {**whole, "first": bad[0] if bad else -1, "last": bool(calls[-1]["bad"])}


def fed(compiled: Compiled, rows: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[torch.Tensor]:
    """Inputs with every threshold, with infinities and NaN, and as models have them; aligned and not."""
    low = str(compiled.low).removeprefix("torch.")
    near = values("float32", infinity=True, nan=True)
    info = torch.finfo(compiled.low)
    half, top = info.tiny * info.eps / 2, info.max + math.ldexp(info.eps, math.frexp(info.max)[1] - 2)
    places = [np.float32(one) for one in (half, info.tiny - half, top)]
    edges = [
        float(one)
        for at in places
        for one in (np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(math.inf)))
    ]
    tame = log_uniform(2.0**-30, 2.0**10).map(np.float32).map(float)
    kinds = [
        tensors("float32", shape=rows, elements=near, layout=["contiguous", "offset"]),
        tensors("float32", shape=rows, elements=tame, layout=["contiguous", "offset"]),
        tensors("float32", shape=rows, elements=values(low)),
        tensors("float32", shape=rows, min_value=-half, max_value=half),  # all of it flushes
        tensors("float32", shape=rows, elements=st.sampled_from([*edges, 0.0])),
        heavy_tails(shape=rows, scale=1e-4),
        heavy_tails(shape=rows, scale=3.0, limit=1e6),
        outlier_channels(shape=(ROWS, WIDTH), factor=2.0**15),
        st.lists(cancelling_pairs(low), min_size=ROWS * WIDTH // 2, max_size=ROWS * WIDTH // 2).map(
            lambda pairs: torch.tensor(pairs, dtype=torch.float32).reshape(ROWS, WIDTH)
        ),
    ]
    return st.one_of(kinds)


@given(data=st.data())
def test_every_count_of_every_site_over_any_calls_is_that_of_eager_kernels(
    compiled: Compiled, data: st.DataObject
) -> None:
    rows = st.integers(2, 12) if compiled.dynamic else st.just(ROWS)
    if torch.__version__ < (2, 7):  # whose Inductor compiles again for as many rows as columns
        rows = rows.filter(lambda n: n != WIDTH)
    many = data.draw(st.lists(fed(compiled, rows.map(lambda n: (n, WIDTH))), min_size=1, max_size=3))
    sites, gave = compiled.measured(many)

    expected: list[list[dict[str, Any]]] = [[], [], []]
    for x, (narrow, product, scaled) in zip(many, gave, strict=True):
        eager = x.to(compiled.low)
        assert torch.equal(narrow.nan_to_num(), eager.nan_to_num())
        assert torch.equal(scaled.nan_to_num(), (product.float() * 2.0**-6).to(compiled.low).nan_to_num())
        one = [
            counted(x, compiled.low, cast=True),
            counted(product, compiled.low, cast=False),
            counted(product.float() * 2.0**-6, compiled.low, cast=True),
        ]
        # The first has nothing before it; the others are bad through what came before, unless they begin it.
        for place, call in enumerate(one):
            call["born"] = int(bool(call["bad"]) and not (place and one[place - 1]["bad"]))
            expected[place].append(call)
    assert [site.cast for site in sites] == [True, False, True]
    for site, calls in zip(sites, expected, strict=True):
        wanted = together(calls)
        assert site.lost == pytest.approx(wanted.pop("lost"), rel=1e-6)
        assert {name: getattr(site, name) for name in wanted} == wanted


@given(data=st.data())
def test_calls_apart_add_up_to_calls_together(compiled: Compiled, data: st.DataObject) -> None:
    many = data.draw(st.lists(fed(compiled, st.just((ROWS, WIDTH))), min_size=2, max_size=3))
    cut = data.draw(st.integers(1, len(many) - 1))
    whole, _ = compiled.measured(many)
    for place, site in enumerate(whole):
        one, other = (compiled.measured(part)[0][place] for part in (many[:cut], many[cut:]))
        later = replace(other, first=other.first + cut if other.first >= 0 else -1)
        assert replace(one + later, order=site.order) == site


# The record ---------------------------------------------------------------------------------------------------------

counts = st.integers(0, 2**40)
stats = st.builds(
    SiteStats,
    st.just(Where("forward", "a", "aten::mm", "", None)),
    st.just("float16"),
    st.booleans().map(lambda _: True),
    order=st.tuples(counts, counts),
    **dict.fromkeys(("calls", "numel", "zeros", "flushed", "subnormals", "overflowed", "infs", "nans"), counts),
    **dict.fromkeys(("bad", "born", "emptied"), counts),
    amax=values("float32", min_value=0.0),
    smallest=values("float32", min_value=0.0) | st.just(math.inf),
    last=st.booleans(),
    first=st.integers(-1, 100),
    written=st.booleans(),
    fed=st.booleans(),
    lost=values("float32", min_value=0.0, max_value=1.0),
)


@given(stats, stats, stats)
def test_the_sum_of_sites_is_associative_and_but_for_the_last_call_commutative(
    a: SiteStats, b: SiteStats, c: SiteStats
) -> None:
    assert (a + b) + c == a + (b + c)
    assert replace(a + b, last=False) == replace(b + a, last=False)
    assert (a + b).last == b.last


@given(stats)
def test_a_site_that_never_ran_is_the_identity_before_any_other(a: SiteStats) -> None:
    nothing = SiteStats(a.where, a.format, a.cast, order=a.order)
    assert nothing + a == a
    assert replace(a + nothing, last=a.last) == a


@given(stats, stats)
def test_every_field_has_its_own_way_to_add_up(a: SiteStats, b: SiteStats) -> None:
    summed = {
        "calls",
        "numel",
        "zeros",
        "flushed",
        "subnormals",
        "overflowed",
        "infs",
        "nans",
        "bad",
        "born",
        "emptied",
    }
    both = a + b
    for name in summed:
        assert getattr(both, name) == getattr(a, name) + getattr(b, name)
    assert (both.amax, both.lost) == (max(a.amax, b.amax), max(a.lost, b.lost))
    assert both.smallest == min(a.smallest, b.smallest)
    assert both.order == min(a.order, b.order)
    assert both.first == min([n for n in (a.first, b.first) if n >= 0], default=-1)
    assert (both.written, both.fed) == (a.written or b.written, a.fed or b.fed)
    known = summed | {"amax", "lost", "smallest", "order", "first", "last", "written", "fed"}
    assert {field.name for field in fields(SiteStats)} - known == {"where", "format", "cast", "weight", "nth"}
