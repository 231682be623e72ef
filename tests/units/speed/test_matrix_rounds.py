"""The matrix shares its time and the device's memory among its arms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from matrix_plants import Planted, measured

from ampcheck.core.errors import UsageError
from ampcheck.core.subject import Subject
from ampcheck.records.matrix import DOES_NOT, PAYS
from ampcheck.speed import compiling
from ampcheck.speed.matrix import measure
from ampcheck.speed.matrix.judge import matrix_run
from ampcheck.speed.matrix.measure import copy_bytes
from ampcheck.speed.memory import Peak
from ampcheck.speed.steps import StepConfig


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_warm_up_compiler", lambda device: None)


QUICK = {"eager, float32": 0.010, "default, float32": 0.005, "eager, bfloat16": 0.008, "default, bfloat16": 0.007}


def test_arms_that_are_much_slower_do_not_take_the_time_of_the_others() -> None:
    """float16 on a CPU takes up to 30 times as long."""
    alone = measured(Planted(seconds=QUICK), precisions=("float32", "bfloat16"))
    slow = Planted(seconds={**QUICK, "eager, float16": 0.3, "default, float16": 0.02})
    beside = measured(slow, precisions=("float32", "bfloat16", "float16"))

    assert beside.cycles > 12, "all in turn it would be 8"
    assert 0 < beside.apart < beside.cycles
    assert beside.cell("default", "float32").verdict == PAYS
    assert [cell.name for cell in beside.cells if cell.apart] == ["eager, float16", "default, float16"]
    assert not any(cell.apart for cell in alone.cells)


def test_what_is_much_slower_is_still_compared_with_eager_float32_and_with_its_own_precision() -> None:
    seconds = {**QUICK, "eager, float16": 0.060, "default, float16": 0.020}
    stats = measured(Planted(seconds=seconds), precisions=("float32", "float16"))

    cell = stats.cell("default", "float16")
    assert cell.ratio is not None
    assert cell.gain is not None
    assert cell.ratio.median == pytest.approx(10 / 20, rel=0.02)
    assert cell.gain.median == pytest.approx(60 / 20, rel=0.02)
    assert cell.verdict == DOES_NOT
    note = matrix_run(stats).tables[0].note
    assert "a measurement of their own" in note
    assert "eager, float16; default, float16" in note


def test_an_arm_of_float32_goes_apart_alone_and_where_all_are_slow_none_does() -> None:
    mixed = measured(Planted(seconds={**QUICK, "max-autotune, float32": 0.05}), ("eager", "default", "max-autotune"))
    assert [cell.name for cell in mixed.cells if cell.apart] == ["max-autotune, float32"]

    only = measured(Planted(seconds={**QUICK, "default, float32": 0.05}))
    assert not any(cell.apart for cell in only.cells)
    assert only.apart == 0


def test_slow_arms_that_fail_while_they_are_timed_leave_the_others_their_times() -> None:
    class Breaking(Planted):
        def step(self, config: StepConfig, device: str) -> Callable[[], float]:
            step, calls = super().step(config, device), [0]

            def counted() -> float:
                calls[0] += 1
                if config.precision == "float16" and calls[0] > 8:
                    raise ValueError("out of memory")
                return step()

            return counted

    planted = Breaking(seconds={**QUICK, "eager, float16": 0.3, "default, float16": 0.3})
    stats = measured(planted, precisions=("float32", "float16"))

    assert "out of memory" in stats.cell("eager", "float16").reason
    assert stats.cell("default", "float32").ratio is not None


def test_copies_that_do_not_fit_are_refused_before_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Planted()  # four bytes for each of four weights and two biases
    assert copy_bytes(planted) == 24

    monkeypatch.setattr("ampcheck.speed.matrix.measure.available_memory", lambda device: 2 * 24 - 1)
    with pytest.raises(UsageError, match=r"2 copies of planted need .* with --mode and --precision"):
        measured(planted)
    assert planted.built == []
    monkeypatch.setattr("ampcheck.speed.matrix.measure.available_memory", lambda device: 2 * 24)
    assert measured(planted).cell("default", "float32").reason == ""
    monkeypatch.setattr("ampcheck.speed.matrix.measure.available_memory", lambda device: None)
    assert measured(planted).cell("default", "float32").reason == ""


def test_a_weight_that_is_shared_is_counted_once_in_a_copy() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    tied = Planted(make=lambda: Subject((model, (torch.ones(1, 4),))))

    assert copy_bytes(tied) == 64


def test_memory_counts_what_an_arm_keeps_and_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator's: each arm has weights, and its first call makes a pool or the state of an optimizer."""
    taken = {"bytes": 0}

    class Keeping(Planted):
        def step(self, config: StepConfig, device: str) -> Callable[[], float]:
            step, made = super().step(config, device), []
            taken["bytes"] += 100

            def kept() -> float:
                if not made:
                    made.append(True)
                    taken["bytes"] += 7000 if config.mode == "default" else 30
                return step()

            return kept

    def peak_memory(step: Callable[[], object], *, device: str, before: int | None) -> Peak:
        assert before is not None
        return Peak(taken["bytes"] + 5 - before)

    monkeypatch.setattr(measure, "allocated_memory", lambda device: taken["bytes"])
    monkeypatch.setattr(measure, "peak_memory", peak_memory)
    stats = measured(Keeping(seconds=QUICK), precisions=("float32", "bfloat16"), memory=True)

    peaks = {cell.name: cell.peak for cell in stats.cells}
    eager, compiled = 35, 7005
    assert peaks == {
        "eager, float32": eager, "default, float32": compiled, "eager, bfloat16": eager, "default, bfloat16": compiled,
    }  # fmt: skip
