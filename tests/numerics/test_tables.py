"""The tables and charts hold what the verdicts rest on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampcheck import Run, audit, demo
from ampcheck.core.run import Table


@pytest.fixture(scope="module")
def run() -> Run:
    return audit(demo.subject(), dtype="float16", compile=False)


def _table(run: Run, start: str) -> Table:
    return next(table for table in run.tables if table.title.startswith(start))


def test_every_output_and_gradient_stands_beside_its_limit(run: Run) -> None:
    table = _table(run, "Error against float64")
    kinds = [row[0] for row in table.rows]
    assert kinds.count("output") == run.coverage.seen["outputs"]
    assert kinds.count("gradient") == run.coverage.seen["gradients"]
    for row in table.rows:
        values = dict(zip(table.columns, row, strict=True))
        assert (values["error"] <= values["limit"]) == (values["verdict"] != "beyond"), row


def test_a_span_of_the_chart_rises_from_the_smallest_to_the_largest_magnitude(run: Run) -> None:
    (chart,) = run.charts
    assert {series.label for series in chart.series} >= {"blocks.0.qkv", "blocks.1.down", "head", "(root)"}
    for series in chart.series:
        assert list(series.x) == sorted(series.x)
        assert all(math.isfinite(x) for x in series.x)
    assert [band.label for band in chart.bands][:2] == ["float16 subnormal", "float16 normal"]


def test_the_largest_magnitude_of_a_module_is_the_one_that_it_has() -> None:
    linear = nn.Linear(4, 4)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    run = audit((linear, torch.full((2, 4), 3.0)), dtype="bfloat16", compile=False)
    (series,) = [s for s in run.charts[0].series if s.group == "forward"]
    assert series.x[-1] == pytest.approx(math.log2(3.0))


def test_an_op_that_lost_values_has_a_row_with_its_source() -> None:
    run = audit((lambda x: (x * 1e-8).float(), torch.ones(8).half()), compile=False)
    table = _table(run, "Ops that lost")
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert any(row["op"] == "aten::mul.Tensor" and "test_tables.py" in str(row["source"]) for row in rows)
