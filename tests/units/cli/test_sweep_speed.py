"""`ampcheck sweep --speed`: what torch.compile and autocast are worth, by model, by family and over all."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import geometric_mean

import pytest

from ampcheck.cli.main import main
from ampcheck.core.run import Run, Scalar
from ampcheck.speed.gains.measure import GAINS
from ampcheck.speed.gains.tables import Figures, gain_tables

MODEL = """
import torch

class Breaks(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y.relu()

def subject(kind):
    torch.manual_seed(0)
    return kind(64, 64).eval(), torch.ones(8, 64)

MODELS = {"whole": lambda: subject(torch.nn.Linear), "breaks": lambda: subject(Breaks)}
def loop(): return {"step": lambda i: 0.0}
"""


def figures(compiles: str = "whole", **gains: tuple[float, float, float]) -> Figures:
    row: dict[str, Scalar] = {"compiles": compiles}
    for name in GAINS:
        values = gains.get(name.replace(", ", "_"), (None, None, None))
        row |= dict(zip((name, f"{name} low", f"{name} high"), values, strict=True))
    return row


def test_the_mean_is_geometric_and_its_interval_is_over_models() -> None:
    generator = random.Random(0)
    gains = [math.exp(generator.gauss(0.2, 0.1)) for _ in range(60)]
    models = [(f"m{i}", "", figures(compiled=(gain, gain * 0.99, gain * 1.01))) for i, gain in enumerate(gains)]
    by_model, means = gain_tables(models)
    assert len(by_model.rows) == 60
    ((name, count, mean, low, high, faster, slower, noisy),) = means.rows
    assert (name, count, noisy) == ("compiled", 60, 0)
    assert mean == pytest.approx(geometric_mean(gains), rel=1e-3)
    half = 1.96 * 0.1 / math.sqrt(60)  # of the mean of logarithms
    assert math.log(high / low) == pytest.approx(2 * half, rel=0.3)  # type: ignore[operator]
    assert faster == sum(gain * 0.99 > 1 for gain in gains)
    assert slower == sum(gain * 1.01 < 1 for gain in gains)


def test_a_model_that_does_not_compile_has_no_part_in_the_mean_of_those_that_do() -> None:
    models = [
        ("a", "small", figures(compiled=(2.0, 1.9, 2.1))),
        ("b", "small", figures("with breaks", compiled=(0.5, 0.4, 0.6))),
        ("c", "large", figures("not", autocast=(1.5, 1.4, 1.6))),
        ("d", "large", {}),  # not measured
    ]
    by_model, by_family, means = gain_tables(models)
    assert [row[0] for row in by_model.rows] == ["a", "b", "c"]
    assert by_family.rows == [
        ("large", 1, 0, 0, 1, None, None, 1.5, None),
        ("small", 2, 1, 1, 0, 1.0, None, None, None),
    ]
    assert means.rows[0][:3] == ("compiled", 2, 1.0)
    assert means.rows[0][5:] == (1, 1, 0)
    assert means.rows[1] == ("autocast", 1, 1.5, None, None, 1, 0, 0)  # of one model there is no interval
    assert "2 of 3 models compile" in means.note


def test_a_gain_that_is_not_known_well_enough_has_no_part_in_the_mean() -> None:
    models = [
        ("a", "", figures(compiled=(2.0, 1.9, 2.1))),
        ("b", "", figures(compiled=(88.0, 0.02, 447.0))),  # of a busy machine
    ]
    means = gain_tables(models)[-1]
    assert means.rows == [("compiled", 1, 2.0, None, None, 1, 0, 1)]


def test_models_are_compiled_timed_and_started_and_one_that_runs_by_itself_is_a_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.py").write_text(MODEL)
    (tmp_path / "list.txt").write_text("models.py:MODELS[*]\nmodels.py:loop\n")
    monkeypatch.chdir(tmp_path)
    main(["sweep", "list.txt", "--speed", "--no-compile", "--dtype", "bfloat16", "--json", "all.json"])
    run = Run.load(tmp_path / "all.json")
    table = next(table for table in run.tables if table.title == "Compilation")
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == ["whole", "breaks"]
    assert rows["whole"]["compiles"] == "whole"
    assert (rows["breaks"]["compiles"], rows["breaks"]["breaks"]) == ("with breaks", 1)
    for row in rows.values():
        for gain in GAINS:
            assert 0 < row[f"{gain} low"] <= row[gain] <= row[f"{gain} high"]  # type: ignore[operator]
        assert row["cold s"] > 0  # type: ignore[operator]
        assert row["warm s"] < row["cold s"]  # type: ignore[operator]
        assert row["accuracy, float32"] == "pass"
    assert any("runs by itself" in finding.message for finding in run.findings)
