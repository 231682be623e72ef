"""The matrix on planted times: what pays, what does not, what a machine lacks, what raises, and what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from matrix_plants import Planted, measured
from simulated import SimulatedClock, taking

from ampcheck.checks.speed.speedup import check
from ampcheck.core.errors import UsageError
from ampcheck.core.limits import Limits
from ampcheck.core.run import Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.records.matrix import DOES_NOT, PAYS, UNDECIDED, WRONG, Cell, MatrixStats
from ampcheck.records.speed import ArmTimes, Ratio
from ampcheck.speed import compiling
from ampcheck.speed.matrix import measure
from ampcheck.speed.matrix.accuracy import Judged
from ampcheck.speed.matrix.judge import matrix_run
from ampcheck.speed.matrix.measure import measure_matrix, verdict_of
from ampcheck.speed.matrix.stats import workload_of
from ampcheck.speed.startup.stats import break_even
from ampcheck.speed.steps import StepConfig


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is compiled by Inductor, whose first compilation takes its time."""
    monkeypatch.setattr(compiling, "_warm_up_compiler", lambda device: None)


def test_what_is_faster_pays_what_is_slower_or_hardly_faster_does_not() -> None:
    stats = measured(Planted(), ("eager", "default", "max-autotune"), ("float32",))

    fast, same = stats.cell("default", "float32"), stats.cell("max-autotune", "float32")
    assert (fast.verdict, same.verdict) == (PAYS, DOES_NOT)
    assert fast.ratio is not None
    assert fast.ratio.median == pytest.approx(2, rel=0.02)
    assert stats.paying == [fast]
    assert stats.cell("eager", "float32").verdict == ""


def test_a_gain_is_against_eager_mode_in_the_same_precision_and_a_ratio_against_float32() -> None:
    stats = measured(Planted(), precisions=("bfloat16",))

    cell = stats.cell("default", "bfloat16")
    assert cell.ratio is not None
    assert cell.gain is not None
    assert cell.ratio.median == pytest.approx(10 / 16, rel=0.02)
    assert cell.gain.median == pytest.approx(8 / 16, rel=0.02)
    assert cell.break_even is not None
    assert cell.break_even.never
    assert stats.cell("eager", "float32").seconds == pytest.approx(0.010, rel=0.02), "it is measured unasked"


def test_a_noisy_twin_leaves_small_gains_undecided_and_large_ones_not() -> None:
    reference, twin = (ArmTimes(name, tuple(times)) for name, times in (("r", [1.0] * 40), ("t", [0.9, 1.1] * 20)))

    def arm(seconds: float) -> ArmTimes:
        return ArmTimes("a", (seconds,) * 40)

    assert verdict_of(reference, twin, arm(0.5), 1) == PAYS
    assert verdict_of(reference, twin, arm(1.5), 1) == DOES_NOT
    assert verdict_of(reference, twin, arm(1 / 1.08), 1) == UNDECIDED
    assert verdict_of(reference, reference, arm(1 / 1.08), 1) == PAYS
    few = [ArmTimes(name, one.seconds[:5]) for name, one in (("r", reference), ("t", reference), ("a", arm(0.5)))]
    assert verdict_of(*few, 1) == UNDECIDED


def test_compilation_has_paid_when_its_cost_is_saved_and_never_where_nothing_is() -> None:
    eager, fast, slow = (ArmTimes(name, (s,) * 10) for name, s in (("e", 0.010), ("f", 0.006), ("s", 0.012)))

    assert break_even(8.0, eager, fast, lowest=8.0, highest=8.0).calls == pytest.approx(2000)
    assert math.isinf(break_even(8.0, eager, slow, lowest=8.0, highest=8.0).calls)


def test_what_this_machine_lacks_is_a_cell_with_a_reason_and_is_never_built() -> None:
    planted = Planted()
    stats = measured(planted, ("eager", "default", "reduce-overhead"), ("float32", "tf32"))

    assert "tensor cores" in stats.cell("eager", "tf32").reason
    assert "the code of the mode default" in stats.cell("reduce-overhead", "float32").reason
    assert not any(cell.failed for cell in stats.cells)
    assert planted.built == ["eager, float32", "default, float32"]


def test_a_cell_that_raises_holds_the_error_and_the_others_are_measured() -> None:
    stats = measured(Planted(raising=("default, float32",)), precisions=("float32", "bfloat16"))

    broken = stats.cell("default", "float32")
    assert "no such kernel" in broken.reason
    assert broken.failed
    assert stats.cell("default", "bfloat16").ratio is not None
    warned = [finding for finding in check(stats, Limits()) if finding.verdict is Verdict.WARN]
    assert ["no such kernel" in finding.message for finding in warned] == [True]


def test_without_eager_float32_nothing_is_compared_and_each_cell_says_why() -> None:
    stats = measured(Planted(raising=("eager, float32",)), precisions=("float32", "bfloat16"))

    assert all("no such kernel" in cell.reason and cell.ratio is None for cell in stats.cells)
    assert check(stats, Limits())[0].verdict is Verdict.SKIP


def test_an_arm_that_was_to_be_compiled_and_made_no_graph_is_no_compiled_cell() -> None:
    stats = measured(Planted(hollow=True), precisions=("float32", "bfloat16"))

    cell = stats.cell("default", "float32")
    assert cell.reason.startswith("it ran eager")
    assert cell.failed
    assert cell.ratio is None


def test_more_arms_than_dynamo_compiles_one_function_for_still_run_compiled() -> None:
    """The default limit is 8, and beyond it code runs eager without a word."""

    def shared(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class Crowded(Planted):
        def step(self, config: StepConfig, device: str) -> Callable[[], float]:
            if config.mode != "eager":
                for number in range(12):
                    torch.compile(shared, backend="eager", dynamic=False)(torch.ones(number + 2))
                before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                torch.compile(shared, backend="eager", dynamic=False)(torch.ones(99))
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
            return taking(0.01)

    assert measured(Crowded()).cell("default", "float32").reason == ""


def test_a_fast_cell_with_wrong_numbers_is_no_win(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(judge: Any, mode: str, precision: str) -> Judged:
        return Judged(Verdict.PASS, "right", 1e-7) if mode == "eager" else Judged(Verdict.FAIL, "off by 3", 3.0)

    monkeypatch.setattr(measure.Judge, "of", of)
    clock = SimulatedClock(0.005)
    stats = measure_matrix(
        Planted(), modes=("default",), precisions=("float32",), budget=1.0, memory=False, clock=clock
    )
    cell = stats.cell("default", "float32")
    assert (cell.verdict, cell.accuracy, cell.error) == (WRONG, "fail", 3.0)
    assert stats.best is None
    assert any("no win" in finding.message for finding in check(stats, Limits()))
    assert WRONG in matrix_run(stats).tables[0].rows[1]


@pytest.mark.parametrize("budget", [3.0, 0.15], ids=["many cycles", "too few for any interval"])
def test_a_run_survives_json_with_its_infinities(budget: float) -> None:
    stats = measured(Planted(), ("eager", "default", "reduce-overhead"), ("float32", "bfloat16"), budget=budget)

    assert math.isinf(stats.noise) is (stats.cycles < 6) is (budget < 1)
    run = matrix_run(stats)
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == Run.from_json(run.to_json())
    assert run.coverage.seen["cells"] == 4


def cell(mode: str, verdict: str, ratio: float, accuracy: str = "pass") -> Cell:
    return Cell(mode, "float32", ratio=Ratio(ratio, ratio * 0.99, ratio * 1.01), verdict=verdict, accuracy=accuracy)


@pytest.mark.parametrize("accuracy", ["", "skip", "undecided"])
def test_a_cell_that_nobody_judged_is_fast_and_is_not_called_right(accuracy: str) -> None:
    unjudged = cell("max-autotune", PAYS, 1.7, accuracy)
    stats = MatrixStats("w", (cell("eager", "", 1.0), unjudged))
    (found,) = check(stats, Limits())
    assert found.verdict is Verdict.UNDECIDED
    assert "not judged" in found.message
    assert "max-autotune, float32: 1.7 times" in found.message
    assert stats.best is None

    judged = cell("default", PAYS, 1.5)
    (found,) = check(MatrixStats("w", (cell("eager", "", 1.0), unjudged, judged)), Limits())
    assert found.verdict is Verdict.PASS
    assert "fastest such is default, float32: 1.5" in found.message
    assert "not judged is max-autotune, float32: 1.7" in found.message


def test_a_matrix_without_accuracy_calls_nothing_right() -> None:
    found = check(measured(Planted()), Limits())

    assert [one.verdict for one in found] == [Verdict.UNDECIDED]
    assert "not judged" in found[0].message


def test_the_load_of_the_machine_is_in_the_run() -> None:
    cells = (cell("eager", "", 1.0), cell("default", PAYS, 1.5))
    stats = MatrixStats("one", cells, fingerprint={"device": "cpu"}, conditions={"load, highest": 0.5})

    assert matrix_run(stats).environment == {"device": "cpu", "meanwhile: load, highest": 0.5}


def test_each_workload_has_a_verdict_and_none_is_a_failure() -> None:
    cells = {
        Verdict.PASS: (cell("default", PAYS, 1.5), cell("max-autotune", PAYS, 1.7)),
        Verdict.UNDECIDED: (cell("default", UNDECIDED, 1.01), cell("max-autotune", DOES_NOT, 0.7)),
        Verdict.SKIP: (Cell("default", "float32", reason="no compiler"),),
    }
    for verdict, given in cells.items():
        found = check(MatrixStats("w", (cell("eager", "", 1.0), *given)), Limits())
        assert [finding.verdict for finding in found] == [verdict]
    message = check(MatrixStats("w", cells[Verdict.PASS]), Limits())[0].message
    assert "max-autotune, float32: 1.7" in message
    none = MatrixStats("w", (cell("default", DOES_NOT, 0.7),))
    assert check(none, Limits())[0].message.startswith("none of 1 cells")
    spoilt = replace(MatrixStats("w", cells[Verdict.PASS]), recompiled=2)
    assert any("2 graphs" in finding.message for finding in check(spoilt, Limits()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modes": ("fast",)}, "modes must be one of eager, .*; found 'fast'"),
        ({"precisions": ("float8",)}, "precisions must be one of float32, .*; found 'float8'"),
        ({"budget": 0}, "budget"),
        ({"modes": ("eager",), "precisions": ("float32",)}, "another mode or precision"),
        ({"subject": lambda: None}, "runs by itself"),
        ({"device": "cuda:99"}, "not there"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_cannot_be_asked_for_is_refused_before_anything_runs(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure_matrix(given.pop("subject", (torch.nn.Linear(2, 2), (torch.ones(1, 2),))), **given)


def test_a_subject_of_the_user_is_a_workload() -> None:
    mine = Subject((torch.nn.Linear(2, 2), (torch.ones(1, 2),)), name="mine")

    assert workload_of(mine).name == "mine"
    assert workload_of(mine).make() is mine
    assert workload_of(workload_of(mine)).make() is mine
    assert workload_of((torch.nn.Linear(2, 2), (torch.ones(1, 2),))).trains is None
