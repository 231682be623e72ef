"""The statistics of matrix products, for every 16-bit pattern, against those of the results."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ampcheck.core.formats import format_of
from ampcheck.records.telemetry import SiteStats
from ampcheck.telemetry.accumulators import GraphAccumulators
from ampcheck.telemetry.sites import Level, select_sites
from ampcheck.telemetry.statistics import append_statistics
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools import dynamo

DTYPES = (torch.bfloat16, torch.float16)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def product_of(rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, SiteStats]:
    """Two vectors' outer product, and its statistics by eager kernels."""
    arguments = rows[:, None], columns[None]
    module = make_fx(lambda a, b: (torch.mm(a, b),), tracing_mode="fake")(*arguments)
    sites = select_sites(module.graph, Level.CASTS, "forward")
    accumulator = GraphAccumulators(tuple(sites.values()), append_statistics(module, sites)).of(0)
    results, packed = module(*arguments)
    accumulator.add(0, packed)
    (site,) = accumulator.read({})
    return results, site


def assert_counted(site: SiteStats, result: torch.Tensor) -> None:
    __tracebackhide__ = True
    size = result.double().abs()
    present = size[size.isfinite() & (size > 0)]
    assert site.numel == result.numel()
    assert site.zeros == int((size == 0).sum())
    assert site.subnormals == int((present < format_of(result.dtype).smallest_normal).sum())
    assert (site.infs, site.nans) == (int(size.isinf().sum()), int(size.isnan().sum()))
    assert (site.amax, site.smallest) == (float(present.max()), float(present.min()))
    assert (site.flushed, site.overflowed) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [2, 3], ids=["even", "odd"])
@pytest.mark.parametrize("below", [1.0, math.inf, math.nan], ids=["small", "finite", "every pattern"])
def test_every_value_that_leaves_a_product_is_counted_as_what_it_is(
    dtype: torch.dtype, columns: int, below: float
) -> None:
    rows = every_pattern(dtype)
    result, site = product_of(rows if math.isnan(below) else rows[rows.abs() < below], torch.ones(columns, dtype=dtype))
    assert_counted(site, result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, 2.0**-14, 2.0**-20, math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_one_odd_value_is_found_at_an_even_and_at_an_odd_place(dtype: torch.dtype, value: float, place: int) -> None:
    columns = torch.full((64,), 2.0, dtype=dtype)
    columns[32 + place] = value
    result, site = product_of(torch.ones(8, dtype=dtype), columns)
    assert_counted(site, result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_compiled_product_is_counted_as_by_eager_kernels(dtype: torch.dtype) -> None:
    dynamo.reset()
    telemetry = Telemetry((), level=Level.CASTS)
    with telemetry.watching():
        result = torch.compile(torch.mm)(every_pattern(dtype)[:, None], torch.ones(1, 2, dtype=dtype))
    (site,) = telemetry.read().sites
    assert_counted(site, result)
