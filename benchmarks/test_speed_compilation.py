"""Suite: full against regional compilation, fixed against varying shapes, cold against warm starts and artifacts.

    pytest benchmarks -k compilation [--size large --ampcheck-device cuda] [--benchmark-json FILE]

What Dynamo and the caches count is asserted, since it is the same in every run; times are kept. `bench_compile_cost.py`
measures what is compared here in fresh processes with empty caches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from speed_subjects import LENGTHS, sized

from ampcheck.compiled.graph.judge import measure_graph
from ampcheck.compiled.options import CompileOptions
from ampcheck.outcome.raising import verify
from ampcheck.speed.options import SpeedOptions
from ampcheck.speed.startup.judge import startup_run
from ampcheck.speed.startup.measure import measure_startup
from ampcheck.speed.steps import EAGER, StepConfig, repeated, step_of

BUDGET = 10.0


@pytest.mark.parametrize("name", ["deep", "deep_training"])
@pytest.mark.benchmark(group="full and regional")
def test_compilation_full_and_regional(name: str, speed: Any, ampcheck_device: str, size: str) -> None:
    subject = sized(name, size)
    configs = {"eager": StepConfig(), "full": StepConfig("default"), "regional": StepConfig("default", regional=True)}
    arms = {arm: step_of(subject, config, device=ampcheck_device) for arm, config in configs.items()}
    stats = speed.measure(arms, subject=subject.name, budget=BUDGET)
    assert len(repeated(subject.model)) > 1
    assert stats.cycles > 1


@pytest.mark.parametrize("name", ["fixed", "varying"])
@pytest.mark.benchmark(group="shapes")
def test_compilation_of_shapes(name: str, speed: Any, ampcheck_device: str, size: str, record_property: Any) -> None:
    subject = sized(name, size)
    dynamics = (None, True, False)
    counted = {}
    for dynamic in dynamics:
        graphs = measure_graph(subject, device=ampcheck_device, options=CompileOptions(dynamic=dynamic))
        counted[dynamic] = len(graphs.graphs)
        record_property(f"graphs, dynamic={dynamic}", len(graphs.graphs))
        record_property(f"recompilations, dynamic={dynamic}", len(graphs.recompiles))
    assert counted[True] == 1
    assert counted[False] == (1 if name == "fixed" else len(LENGTHS))
    assert counted[None] == (1 if name == "fixed" else 2), "the second shape shows Dynamo what varies"
    arms = {"eager": step_of(subject, StepConfig(EAGER), device=ampcheck_device)}
    for dynamic in dynamics:
        arms[f"dynamic={dynamic}"] = step_of(subject, StepConfig("default", dynamic=dynamic), device=ampcheck_device)
    stats = speed.measure(arms, subject=subject.name, budget=BUDGET)
    assert stats.cycles > 1


def test_compilation_cold_warm_and_from_artifacts(ampcheck_device: str, size: str) -> None:
    """Fails where warm caches or artifacts are not used; --ampcheck's report gives the seconds."""
    target = f"{Path(__file__).with_name('speed_subjects.py')}:deep" + ("" if size == "small" else "_large")
    verify(startup_run(measure_startup(target, SpeedOptions(warm=1), device=ampcheck_device)))
