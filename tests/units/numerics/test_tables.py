"""The tables hold what the verdicts rest on."""

from __future__ import annotations

import pytest
import torch

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


def test_an_op_that_lost_values_has_a_row_with_its_source() -> None:
    run = audit((lambda x: (x * 1e-8).float(), torch.ones(8).half()), compile=False)
    table = _table(run, "Ops that lost")
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert any(row["op"] == "aten::mul.Tensor" and "test_tables.py" in str(row["source"]) for row in rows)
