"""Measuring changes nothing; and where it does, that is told with its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from telemetry_models import batch, step
from torch import nn

from ampcheck.records.telemetry import TelemetryStats
from ampcheck.telemetry.graph_variants import GraphVariants
from ampcheck.telemetry.sites import Level, select_sites
from ampcheck.telemetry.statistics import append_statistics
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools import interception


class Attention(nn.Module):
    """A transformer block: norms, softmax and gelu are fused with what stands around them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projected = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projected(self.norm(x)).chunk(3, -1)
        weights = (query @ key.transpose(-1, -2) / 4).softmax(-1)
        return x + F.gelu(self.mixed(weights @ value))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums by atomic additions differ between two plain runs with more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def results(model: nn.Module, dtype: torch.dtype, calls: int = 2) -> list[torch.Tensor]:
    """Loss and every gradient, of the input too, of a compiled step, for each call."""
    compiled = torch.compile(model)
    found = []
    for _ in range(calls):
        model.zero_grad()
        x = batch(4, 8, 16).requires_grad_()
        found.append(step(compiled, x, dtype=dtype))
        found += [x.grad, *(p.grad.clone() for p in model.parameters())]
    return found


def watched(model: nn.Module, dtype: torch.dtype, level: Level) -> tuple[list[torch.Tensor], TelemetryStats]:
    telemetry = Telemetry([model], level=level)
    torch.compiler.reset()
    with telemetry.watching():
        found = results(model, dtype)
    return found, telemetry.read()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_casts_leave_loss_and_every_gradient_bit_identical(dtype: torch.dtype) -> None:
    model = Attention()
    torch.compiler.reset()
    plain = results(model, dtype)

    measured, stats = watched(model, dtype, Level.CASTS)

    assert (stats.graphs, stats.measured) == (2, 4)
    assert all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True))
    assert (stats.perturbation, stats.perturbed) == (0.0, 0)


def test_all_reports_the_perturbation_that_one_finds_by_hand() -> None:
    model = Attention()
    own: list[float] = []

    def handler(lowered: interception.LoweredGraph) -> interception.Runnable:
        module = lowered.copied()
        sites = select_sites(module.graph, Level.ALL, lowered.phase, lowered.sources)
        append_statistics(module, sites)
        plain = lowered.compiled()
        run, _ = lowered.variant(module)

        def both(inputs: list[Any]) -> Sequence[Any]:
            measured = run(list(inputs))[:-1]  # leaves the inputs as they are; the plain graph may write into them
            expected = plain(inputs)
            for one, other in zip(expected, measured, strict=True):
                if isinstance(one, torch.Tensor):
                    wide = one.double()
                    own.append(((wide - other.double()).norm() / wide.norm().clamp_min(1e-300)).item())
            return expected

        return both

    torch.compiler.reset()
    with interception.intercepted(handler):
        results(model, torch.bfloat16, calls=1)
    measured, stats = watched(model, torch.bfloat16, Level.ALL)

    assert stats.measured == 4
    assert stats.perturbation == pytest.approx(max(own), rel=1e-6)
    if not stats.perturbation:
        torch.compiler.reset()
        assert all(torch.equal(*pair) for pair in zip(results(model, torch.bfloat16), measured, strict=True))


class Silent:
    """Statistics are dropped."""

    def add(self, call: int, packed: torch.Tensor) -> None: ...


PACKED = torch.zeros(1, dtype=torch.float64)


def test_the_size_of_a_perturbation_is_told_relative_to_the_output() -> None:
    value = torch.tensor([3.0, 4.0])
    both = GraphVariants(lambda inputs: (inputs[0],), lambda inputs: (inputs[0] + torch.tensor([0.0, 0.5]), PACKED))

    assert both.difference() is None, "nothing has run"
    both.run([value], 0, Silent())

    assert both.difference() == pytest.approx(0.1)


def test_an_output_that_two_plain_runs_give_differently_tells_nothing() -> None:
    runs = iter((1.0, 2.0))
    both = GraphVariants(lambda inputs: (inputs[0] * next(runs),), lambda inputs: (inputs[0] * 3, PACKED))

    both.run([torch.ones(2)], 0, Silent())

    assert both.difference() == 0.0


@pytest.mark.parametrize(
    ("plain", "measured", "difference"),
    [
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0.0),
        ([0.0, -0.0], [-0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1.0], float("inf")),
        ([1.0, 1.0], [1.0, float("nan")], float("inf")),
    ],
    ids=str,
)
def test_nan_and_infinity_agree_with_themselves_and_with_nothing_else(
    plain: list[float], measured: list[float], difference: float
) -> None:
    both = GraphVariants(lambda inputs: (torch.tensor(plain),), lambda inputs: (torch.tensor(measured), PACKED))

    both.run([torch.ones(2)], 0, Silent())

    assert both.difference() == difference


def test_a_graph_whose_outputs_would_lie_otherwise_in_memory_runs_plain_only() -> None:
    """PyTorch tells the strides of forward outputs when it compiles; those of gradients show in the first call."""
    ran: list[str] = []

    def plain(inputs: list[Any]) -> tuple[torch.Tensor]:
        ran.append("plain")
        return (inputs[0] + 1,)

    def measured(inputs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append("measured")
        return (inputs[0] + 1).T.contiguous().T, PACKED

    both = GraphVariants(plain, measured)
    outputs = [both.run([torch.ones(2, 3)], call, Silent())[0] for call in range(2)]

    assert both.other_strides
    assert ran == ["plain", "plain", "measured", "plain"]
    assert [out.stride() for out in outputs] == [(3, 1), (3, 1)]


def test_the_plain_graph_may_reuse_the_memory_of_its_inputs_and_the_measured_one_still_sees_them() -> None:
    """As Inductor does in backward with what forward saved; the copy lies in memory as the tensor does."""

    def plain(inputs: list[Any]) -> tuple[torch.Tensor]:
        assert inputs[0].stride() == (6, 1)
        return (inputs[0].mul_(2).clone(),)

    seen: list[float] = []

    def measured(inputs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(inputs[0].sum().item())
        return (inputs[0] * 2, PACKED)

    both = GraphVariants(plain, measured, frozenset(), frozenset({0}))
    (out,) = both.run([torch.ones(2, 6)[:, :3]], 0, Silent())

    assert seen == [6.0]
    assert out.sum() == 12
    assert both.difference() == 0.0
