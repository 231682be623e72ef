"""The workloads of benchmarks/bench_matrix.py run, in precisions of the CPU, and are judged to be right."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcheck.core.run import Verdict
from ampcheck.speed.matrix.accuracy import Judge
from ampcheck.speed.steps import EAGER, StepConfig

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NAMES = (
    "decoding", "batched inference", "convolutional net", "vision transformer", "diffusion step", "training",
    "training, scaled",
)  # fmt: skip


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of the small size, by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = importlib.import_module("matrix_workloads").WORKLOADS
    return {name: sizes["small"] for name, sizes in found.items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_each_workload_runs(workloads: Any, name: str, precision: str) -> None:
    step = workloads[name].step(StepConfig(EAGER, precision), "cpu")
    step()
    step()


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_has_the_same_weights_and_data_whenever_it_is_made(workloads: Any, name: str) -> None:
    before = torch.get_rng_state()
    first, second = (workloads[name].make() for _ in range(2))

    assert list(workloads) == list(NAMES)
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, first.model.state_dict().values(), second.model.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(first.calls[0].args, second.calls[0].args, strict=True))
    assert any(p.requires_grad for p in first.model.parameters()) is bool(workloads[name].trains)


def test_decoding_reads_what_it_wrote_into_its_cache(workloads: Any) -> None:
    """The logits of a token depend on the tokens before it, which only the cache contains."""
    subject = workloads["decoding"].make()
    model, (first, second, *_) = subject.model, subject.calls
    model(*first.args)
    known = model(*second.args)
    model(1 + first.args[0], first.args[1])

    assert not torch.allclose(known, model(*second.args))


@pytest.mark.parametrize("name", ["batched inference", "training, scaled"])
def test_the_numbers_of_healthy_workloads_are_right_in_each_precision(workloads: Any, name: str) -> None:
    workload = workloads[name]
    judge = Judge(workload.make(), trains=workload.trains, optimizer=workload.optimizer, scaled=True)
    for precision, error in (("float32", 1e-5), ("bfloat16", 0.1), ("float16", 0.01)):
        found = judge.of(EAGER, precision)
        assert found.verdict is Verdict.PASS, found.why
        assert found.error is not None
        assert 0 < found.error < error
