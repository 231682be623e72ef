"""The evidence of the matrix and of the cost of compilation: each row stays with the machine that measured it."""

from __future__ import annotations

import importlib
import json
import math
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ampcheck.core.errors import UsageError
from ampcheck.records.matrix import PAYS, Cell, MatrixStats
from ampcheck.records.speed import TWIN, ArmTimes, Ratio, SpeedStats
from ampcheck.records.startup import BreakEven
from ampcheck.speed.matrix.stats import Workload
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.paired import fingerprint

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
ELSEWHERE = {"device": "cpu (another)", "threads": 64, "torch": "2.9"}


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_matrix")


@pytest.fixture
def cost(matrix: Any) -> Any:
    return importlib.import_module("bench_compile_cost")


def stats(name: str, size: str, known: dict[str, Any], ratio: float = 1.5) -> MatrixStats:
    found = Ratio(ratio, 0.99 * ratio, 1.01 * ratio)
    cells = (
        Cell("eager", "float32", seconds=0.01, ratio=Ratio(1.0, 1.0, 1.0), accuracy="pass"),
        Cell("default", "float32", seconds=0.01, ratio=found, gain=found, verdict=PAYS, accuracy="pass"),
    )
    return MatrixStats(name, cells, size=size, cycles=30, fingerprint=known)


def row(name: str, size: str, known: dict[str, Any], **options: Any) -> dict[str, Any]:
    asked = {"budget": 1.0, "modes": ["default"], "precisions": ["float32"], "threads": 1, **options}
    own = json.loads(json.dumps({"schema": 1, **asdict(stats(name, size, known))}))
    return {"size": size, "name": name, "options": asked, "fingerprint": known, "stats": own}


def ran(script: Any, monkeypatch: pytest.MonkeyPatch, path: Path, *given: str) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--json", str(path), "--threads", "1", "--budget", "1", *given])
    monkeypatch.setattr(script.torch, "set_num_threads", lambda threads: None)
    script.main()


@pytest.fixture
def measured(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the workloads that are measured, and not taken from the evidence."""
    names: list[str] = []

    def measure(workload: Workload, **asked: Any) -> MatrixStats:
        names.append(workload.name)
        return stats(workload.name, workload.size, fingerprint())

    monkeypatch.setattr(matrix, "measure_matrix", measure)
    return names


CHOSEN = ("--modes", "default", "--precisions", "float32")


def test_one_size_is_measured_and_the_other_size_stays(
    matrix: Any, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "matrix_cpu.json"
    large = row("training", "large", ELSEWHERE)
    path.write_text(json.dumps({"rows": [large]}))
    ran(matrix, monkeypatch, path, *CHOSEN)

    held = json.loads(path.read_text())["rows"]
    assert measured == list(matrix.WORKLOADS)
    assert large in held
    assert len(held) == len(matrix.WORKLOADS) + 1
    page = path.with_suffix(".md").read_text()
    assert "cpu (another)" in page
    assert f"threads {fingerprint()['threads']}" in page


def test_only_what_this_machine_measured_with_these_options_is_not_measured_again(
    matrix: Any, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, known = tmp_path / "matrix_cpu.json", fingerprint()
    mine, *others = matrix.WORKLOADS
    told = [
        row(mine, "small", known),
        row(others[0], "small", ELSEWHERE),
        row(others[1], "small", known, budget=30.0),
        row(others[2], "small", known, modes=["eager"]),
        row(others[3], "large", known),
    ]
    path.write_text(json.dumps({"rows": told}))
    ran(matrix, monkeypatch, path, *CHOSEN)

    assert measured == others


def test_figures_survive_json_with_their_infinities(matrix: Any) -> None:
    endless = BreakEven(math.inf, math.inf, math.inf, 8.0, -0.1)
    known = stats("training", "small", {"torch": "2"})
    known = replace(known, noise=math.inf, cells=(*known.cells, replace(known.cells[1], break_even=endless)))

    assert matrix.from_dict(json.loads(json.dumps(matrix.to_dict(known), allow_nan=False))) == known
    with pytest.raises(UsageError, match="damaged"):
        matrix.from_dict({"schema": 1, "workload": "x"})


def test_the_geometric_mean_is_that_of_ratios(matrix: Any) -> None:
    assert matrix.geometric_mean([0.5, 2.0]) == pytest.approx(1)
    assert matrix.geometric_mean([]) is None


def test_nothing_is_written_where_there_is_nothing(
    matrix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "matrix_cpu.json"
    with pytest.raises(SystemExit, match="nothing was measured"):
        ran(matrix, monkeypatch, path, "--compare")
    assert not path.exists()


def test_evidence_that_cannot_be_read_is_not_overwritten(
    matrix: Any, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "matrix_cpu.json"
    for text in ('{"workloads": []}', '{"rows": [{"size": "small"}]}', "{"):
        path.write_text(text)
        with pytest.raises(SystemExit, match="move it away"):
            ran(matrix, monkeypatch, path, "--compare")
        assert path.read_text() == text
    assert measured == []


def test_tables_written_anew_claim_no_machine_but_that_of_each_row(
    matrix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "matrix_cpu.json"
    path.write_text(json.dumps({"rows": [row("training", "small", ELSEWHERE)]}))
    ran(matrix, monkeypatch, path, "--compare")

    page, own = path.with_suffix(".md").read_text(), str(fingerprint()["device"])
    assert "device cpu (another), threads 64" in page
    assert own not in page
    assert own not in path.read_text()


def test_costs_of_another_size_or_machine_are_not_compared(matrix: Any) -> None:
    known = fingerprint()

    def costs(size: str, machine: dict[str, Any]) -> dict[str, Any]:
        figures = {matrix.CHEAPER: 6.0, matrix.KEPT: 0.85, matrix.GAIN: 0.5}
        return {"size": size, "fingerprint": machine, "regional": figures}

    def verdicts(*given: dict[str, Any]) -> list[str]:
        found = [stats("training", "small", known)]
        return [one["verdict"] for one in matrix.compared(found, given) if one["of"].startswith("regional")]

    assert verdicts(costs("small", known)) == ["agrees", "agrees", "not reported"]
    assert verdicts(costs("large", known), costs("small", ELSEWHERE)) == ["not measured"] * 3


def test_nothing_is_kept_where_compilation_gains_nothing(matrix: Any, cost: Any) -> None:
    """Times that are as good as eager mode's would look like nine tenths of the speedup."""

    def figures(eager: float, full: float, regional: float) -> dict[str, Any]:
        times = {"eager": eager, TWIN: eager, "full": full, "regional": regional}
        arms = tuple(ArmTimes(name, (seconds,) * 30) for name, seconds in times.items())
        made: dict[str, Any] = cost.regional_row(SpeedStats("s", arms), 12.0, 2.0)
        return made

    none = figures(1.0, 1.02, 1.2)
    assert none[matrix.KEPT] == none[matrix.GAIN] == matrix.NOTHING
    assert none["from"] is None
    some = figures(1.0, 0.5, 0.625)
    assert some[matrix.KEPT] == pytest.approx(0.8)
    assert some[matrix.GAIN] == pytest.approx(0.6)
    assert some[matrix.CHEAPER] == 6

    def told(*rows: dict[str, Any]) -> list[Any]:
        held = [{"size": "small", "fingerprint": {}, "regional": one} for one in rows]
        found = [stats("training", "small", {})]
        return [(one["here"], one["cells"], one["verdict"]) for one in matrix.compared(found, held)][-2:]

    assert told(none) == [(None, 0, matrix.NOTHING)] * 2
    assert told(none, some) == [(0.8, 1, "agrees"), (0.6, 1, "not reported")]


def test_what_nobody_judged_is_no_speedup(matrix: Any) -> None:
    one = stats("training", "small", {})
    unjudged = replace(one, cells=tuple(replace(cell, accuracy="skip") for cell in one.cells))
    assert matrix.speedups([one], ("float32",), None) == [1.5]
    assert matrix.speedups([unjudged], ("float32",), None) == []


def test_costs_of_one_size_stay_when_another_is_measured_and_each_has_its_machine(
    cost: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "compile_cost_cpu.json"
    options = {"budget": 1.0, "cold": 3, "warm": 3, "threads": 1}
    large = {"size": "large", "name": "fixed", "options": options, "fingerprint": ELSEWHERE, "shapes": []}
    mine = {**large, "size": "small", "fingerprint": fingerprint()}
    path.write_text(json.dumps({"rows": [large, mine, {**large, "size": "small", "name": "varying"}]}))
    seen: list[str] = []

    def noted(name: str, options: Namespace) -> dict[str, Any]:
        seen.append(name)
        return {"shapes": [{"subject": name}]}

    monkeypatch.setattr(cost, "started", noted)
    monkeypatch.setattr(cost, "shaped", noted)
    ran(cost, monkeypatch, path)

    held = json.loads(path.read_text())["rows"]
    assert seen == ["deep", "deep_training", "varying"], "varying was of another machine"
    assert large in held
    assert mine in held
    assert all(one["fingerprint"] == fingerprint() for one in held if one["size"] == "small")
    assert "cpu (another)" in path.with_suffix(".md").read_text()


def test_fresh_processes_have_as_many_threads_as_were_asked_for(cost: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def measure(target: str, options: SpeedOptions, **given: Any) -> None:
        raise AskedError(options.env)

    monkeypatch.setattr(cost, "measure_startup", measure)
    options = Namespace(device="cpu", size="small", cold=1, warm=1, budget=1.0, threads=3)
    with pytest.raises(AskedError, match="'OMP_NUM_THREADS': '3'"):
        cost.started("deep", options)
