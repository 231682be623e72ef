"""Suite: modes x precisions x workloads, and autocast outside against inside the compiled function.

    pytest benchmarks -k modes [--size large --ampcheck-device cuda] [--benchmark-json FILE]

The reference is eager mode in the same precision: a record says what compilation adds. `bench_matrix.py` compares all
with eager float32. Nothing is required of the ratios; they are kept, and compared with `--benchmark-compare`.
"""

from __future__ import annotations

from typing import Any

import pytest

from ampcheck.speed.matrix.measure import MATRIX_MODES, lacks
from ampcheck.speed.matrix.workloads import WORKLOADS
from ampcheck.speed.steps import EAGER, PRECISIONS, Way

BUDGET = 10.0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.benchmark(group="modes")
def test_modes(name: str, precision: str, speed: Any, ampcheck_device: str, size: str) -> None:
    if reason := lacks(Way(EAGER, precision), ampcheck_device):
        pytest.skip(reason)
    ways = [Way(mode, precision) for mode in MATRIX_MODES]
    arms = {
        way.mode: WORKLOADS[name].step(way, device=ampcheck_device, size=size)
        for way in ways
        if not lacks(way, ampcheck_device)
    }
    stats = speed.measure(arms, precision=precision, subject=name, budget=BUDGET)
    assert stats.cycles > 1


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["batched inference", "training"])
@pytest.mark.benchmark(group="autocast outside and inside")
def test_autocast_outside_and_inside(name: str, precision: str, speed: Any, ampcheck_device: str, size: str) -> None:
    ways = {
        "outside": Way("default", precision),
        "inside": Way("default", precision, inside=True),
        "eager": Way(EAGER, precision),
    }
    arms = {arm: WORKLOADS[name].step(way, device=ampcheck_device, size=size) for arm, way in ways.items()}
    stats = speed.measure(arms, precision=precision, subject=name, budget=BUDGET)
    assert stats.cycles > 1
