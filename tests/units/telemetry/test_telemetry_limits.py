"""What telemetry must not do to a run, and what it must not conclude."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from telemetry_models import seen_in
from torch import nn

from ampcheck import UsageError, watch
from ampcheck.core.run import Where
from ampcheck.telemetry import telemetry as telemetry_module
from ampcheck.telemetry.accumulators import GraphAccumulators
from ampcheck.telemetry.graph_variants import GraphVariants
from ampcheck.telemetry.sites import Level, Site
from ampcheck.telemetry.statistics import Layout
from ampcheck.telemetry.telemetry import Telemetry


def site(*, cast: bool, format: str = "float16") -> Site:
    return Site("", Where("forward", "up", "aten::mm"), format, cast)


def test_nan_is_no_zero_and_nothing_is_flushed_below_nothing() -> None:
    names = ("amax", "smallest", "zero", "lost", "tiny", "kept", "finite", "number")
    layout = Layout(tuple((0, name) for name in names), (10,))
    accumulators = GraphAccumulators((site(cast=True),), layout)
    # Ten elements: six NaN, one zero, three of 1.0.
    packed = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0], dtype=torch.float64)
    accumulators.of(0).add(0, packed)
    (seen,) = accumulators.read({})
    assert (seen.zeros, seen.flushed, seen.lost) == (1, 0, 0.0)
    assert seen.nans == 6
    assert seen.bad == 1


def test_the_model_is_let_go_when_the_watch_is_over() -> None:
    model = nn.Linear(16, 16)
    gone = weakref.ref(model.weight)
    compiled = torch.compile(model)
    with watch(compiled, fail_on="never") as seen, torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(2, 16)).sum().backward()
    assert seen.run.coverage.seen["sites"]
    del model, compiled, seen
    torch.compiler.reset()
    gc.collect()
    assert gone() is None


def test_a_watch_inside_another_is_refused_before_it_takes_anything_from_the_outer_one() -> None:
    model = torch.compile(nn.Linear(16, 16))
    with watch(model, fail_on="never") as seen:
        with pytest.raises(UsageError, match="one model at a time"), watch(model, fail_on="never"):
            pass
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(2, 16))
    assert seen.stats.values.measured


def test_a_graph_with_an_op_of_the_users_own_runs_once_in_each_call() -> None:
    runs = 0

    @torch.library.custom_op("ampcheck_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return x * 2

    counted.register_fake(lambda x: torch.empty_like(x))

    @torch.compile
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return counted(x @ w) + 1

    with watch(step, fail_on="never") as seen, torch.no_grad(), torch.autocast("cpu", torch.float16):
        for _ in range(3):
            step(torch.full((4, 4), 300.0), torch.full((4, 4), 300.0))  # overflows
    assert runs == 3
    assert seen.stats.values.sites[-1].bad
    assert any("may do more than compute" in reason for reason in seen.stats.values.unseen)


def test_results_in_float8_are_compared_as_others_are() -> None:
    @torch.compile
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.to(torch.float8_e4m3fn), x.to(torch.float16)

    with watch(step, fail_on="never") as seen:
        step(torch.randn(64))
    assert seen.stats.values.perturbation == 0.0


def test_results_too_large_to_be_held_twice_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampcheck.telemetry.graph_variants._COMPARED_BYTES", 8)
    kept: list[int] = []

    class Accumulator:
        def add(self, call: int, packed: torch.Tensor) -> None:
            kept.append(call)

    def plain(inputs: list[Any]) -> Sequence[Any]:
        return (inputs[0] + 1,)

    def measured(inputs: list[Any]) -> Sequence[Any]:
        return inputs[0] + 1, torch.zeros(2, dtype=torch.float64)

    variants = GraphVariants(plain, measured)
    (out,) = variants.run([torch.ones(16)], 0, Accumulator())
    assert torch.equal(out, torch.full((16,), 2.0))
    assert kept == [0]
    assert variants.difference() is None
    assert "too large" in variants.single_run


class Registry(nn.Module):
    """Finds its parts by a `__getattr__` of its own, as models of some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def test_a_model_with_a_getattr_of_its_own_is_known_by_its_paths() -> None:
    model = torch.compile(Registry())
    with watch(model, fail_on="never") as seen, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 16)).sum().backward()
    assert {"up.weight", "up.bias"} <= {site.weight for site in seen.stats.values.sites}
    assert {site.where.module for site in seen.stats.values.sites} == {"up"}


def test_subnormals_of_a_call_in_which_nothing_else_is_wrong_are_counted_exactly() -> None:
    torch.compiler.reset()
    run, telemetry = torch.compile(lambda x: x * 0.5), Telemetry((), level=Level.ALL)
    with telemetry.watching():
        run(torch.ones(8))
        run(torch.full((8,), 1e-40))
    assert [site.subnormals for site in telemetry.read().sites] == [8]


def test_a_result_that_may_be_empty_runs_as_without_a_watch_and_is_told() -> None:
    torch.compiler.reset()

    def chosen(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (x[m.nonzero().squeeze(1)] * 2.0).half()

    telemetry = Telemetry((), level=Level.ALL)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), telemetry.watching():
        run = torch.compile(chosen, fullgraph=True)
        assert run(torch.ones(4, 2), torch.tensor([0, 1, 1, 0])).shape == (2, 2)
        assert run(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)).shape == (0, 2)
    assert "values whose size depends on data" in telemetry.read().unseen


def test_in_a_release_of_unknown_interfaces_nothing_is_seen_and_the_run_is_untouched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry_module, "unsupported", lambda: "PyTorch 9.9 is new")
    compiled = torch.compile(lambda x: (x * 5).to(torch.float16))
    results: list[torch.Tensor] = []

    stats = seen_in(lambda: results.append(compiled(torch.tensor([2.0]))))

    assert results[0].tolist() == [10.0]
    assert stats.skipped == "PyTorch 9.9 is new"
    assert not stats.sites
