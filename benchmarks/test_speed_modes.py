"""Suite: modes x precisions x workloads, and autocast outside against inside the compiled function.

    pytest benchmarks -k modes [--size large --ampcheck-device cuda] [--benchmark-json FILE]

The reference is eager mode in the same precision: a record says what compilation adds. `bench_matrix.py` compares all
with eager float32. Nothing is required of the ratios; they are kept, and compared with `--benchmark-compare`.
"""

from __future__ import annotations

from typing import Any

import pytest
from matrix_workloads import WORKLOADS

from ampcheck.speed.matrix.measure import MATRIX_MODES, lacks
from ampcheck.speed.steps import EAGER, PRECISIONS, StepConfig

BUDGET = 10.0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.benchmark(group="modes")
def test_modes(name: str, precision: str, speed: Any, ampcheck_device: str, size: str) -> None:
    if reason := lacks(StepConfig(EAGER, precision), ampcheck_device):
        pytest.skip(reason)
    configs = [StepConfig(mode, precision) for mode in MATRIX_MODES]
    arms = {
        config.mode: WORKLOADS[name][size].step(config, ampcheck_device)
        for config in configs
        if not lacks(config, ampcheck_device)
    }
    stats = speed.measure(arms, precision=precision, subject=name, budget=BUDGET)
    assert stats.cycles > 1


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["batched inference", "training"])
@pytest.mark.benchmark(group="autocast outside and inside")
def test_autocast_outside_and_inside(name: str, precision: str, speed: Any, ampcheck_device: str, size: str) -> None:
    configs = {
        "outside": StepConfig("default", precision),
        "inside": StepConfig("default", precision, inside=True),
        "eager": StepConfig(EAGER, precision),
    }
    arms = {arm: WORKLOADS[name][size].step(config, ampcheck_device) for arm, config in configs.items()}
    stats = speed.measure(arms, precision=precision, subject=name, budget=BUDGET)
    assert stats.cycles > 1
