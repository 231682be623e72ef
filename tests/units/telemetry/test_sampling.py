"""Sampling: which calls are measured, at what cost to the rest, and what is known of those whose values overflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from telemetry_models import Block, batch, seen_in, step
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

from ampcheck.telemetry.graph_variants import GraphVariants
from ampcheck.telemetry.sites import Level
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools import interception

HALF = torch.float16


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which variant of a graph ran, in order."""
    ran: list[str] = []
    begin = GraphVariants.__init__

    def named(name: str, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def noted(inputs: list[Any]) -> Any:
            ran.append(name)
            return run(inputs)

        return noted

    def noting(self: GraphVariants, plain: Any, measured: Any, *rest: Any) -> None:
        begin(self, named("plain", plain), named("measured", measured), *rest)

    monkeypatch.setattr(GraphVariants, "__init__", noting)
    return ran


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return (x * self.scale).to(HALF)


def test_exactly_every_nth_call_is_measured_and_nothing_recompiles_or_breaks(variants: list[str]) -> None:
    model = Block()
    compiled = torch.compile(model)
    counters.clear()

    def run() -> None:
        for _ in range(7):
            step(compiled, batch(4, 8))

    stats = seen_in(run, model, every=3)

    assert {site.calls for site in stats.sites} == {3}, "calls 0, 3 and 6"
    assert (stats.graphs, stats.calls, stats.measured) == (2, 14, 6)
    # The first measured call also runs the plain graph twice, to compare.
    forward_and_backward = 2 * (["plain"] * 2 + ["measured"]) + 2 * (2 * ["plain"] * 2 + ["measured"] * 2)
    assert sorted(variants) == sorted(forward_and_backward)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]


def test_weights_that_get_new_memory_in_every_step_are_still_those_of_the_same_module() -> None:
    model = Block()
    compiled = torch.compile(model)
    held: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(4):
            step(compiled, batch(4, 8))
            for parameter in model.parameters():
                held.append(parameter.data)  # else the new memory could be the old
                parameter.data = parameter.data.clone()

    stats = seen_in(run, model, every=2)

    assert {site.calls for site in stats.sites} == {2}
    assert (stats.calls, stats.measured) == (8, 4)


def test_after_the_block_the_plain_graphs_run_and_nothing_is_measured(variants: list[str]) -> None:
    model = Block()
    compiled = torch.compile(model)
    seen: list[int] = []
    telemetry = Telemetry([model])
    torch.compiler.reset()
    counters.clear()
    with telemetry.watching():
        step(compiled, batch(4, 8))
        seen.append(telemetry.read().measured)
    variants.clear()

    step(compiled, batch(4, 8))

    assert variants == ["plain", "plain"], "one forward, one backward"
    assert telemetry.read().measured == seen[0] == 2
    assert counters["stats"]["unique_graphs"] == 1


def test_an_exception_of_the_user_leaves_the_compiler_as_it_was() -> None:
    before = compile_fx.compile_fx

    def run() -> None:
        with Telemetry().watching():
            assert compile_fx.compile_fx is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert compile_fx.compile_fx is before


def test_nothing_is_read_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block()
    compiled = torch.compile(model)
    telemetry = Telemetry([model])
    torch.compiler.reset()
    reads: list[str] = []
    with telemetry.watching():
        step(compiled, batch(4, 8))
        for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
            real = getattr(torch.Tensor, name)

            def noting(self: torch.Tensor, *args: Any, real: Any = real, name: str = name) -> Any:
                reads.append(name)
                return real(self, *args)

            monkeypatch.setattr(torch.Tensor, name, noting)
        loss = step(compiled, batch(4, 8))
        monkeypatch.undo()
    assert loss.isfinite()
    assert reads == []


# What overflows ----------------------------------------------------------------------------------------------------


def cast_of(feed: Sequence[torch.Tensor], monkeypatch: pytest.MonkeyPatch | None = None) -> tuple[Any, Cast]:
    model = Cast()
    compiled = torch.compile(model)

    def run() -> None:
        with torch.no_grad():
            for x in feed:
                compiled(x)

    return seen_in(run, model), model


CALM, LOUD = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 1e5, 1e6, float("nan")])


def test_the_counts_of_a_call_with_overflows_are_exact(variants: list[str]) -> None:
    stats, model = cast_of([CALM, CALM, LOUD, CALM])

    assert variants == ["plain", "plain", *["measured"] * 4]
    (site,) = (site for site in stats.sites if site.cast)
    assert (site.overflowed, site.nans, site.infs, site.zeros) == (2, 1, 0, 0)
    assert (site.calls, site.bad, site.born, site.first, site.last) == (4, 1, 1, 2, False)
    assert site.amax == 1e6
    assert model.count.tolist() == [4.0] * 4, "what the graph writes is written once a call"


def test_so_are_those_of_many_such_calls(variants: list[str]) -> None:
    stats, model = cast_of([CALM, LOUD, LOUD, LOUD, LOUD, LOUD])

    assert variants == ["plain", "plain", *["measured"] * 6]
    (site,) = (site for site in stats.sites if site.cast)
    assert (site.overflowed, site.nans, site.bad, site.first) == (10, 5, 5, 1)
    assert model.count.tolist() == [6.0] * 4


def test_a_graph_that_cannot_be_compiled_with_statistics_runs_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(interception.LoweredGraph, "variant", failing)

    stats, model = cast_of([CALM, CALM])

    assert model.count.tolist() == [2.0] * 4
    assert not stats.measured
    assert any("no kernel" in reason for reason in stats.unseen)


def test_random_numbers_of_a_call_that_overflows_are_drawn_once() -> None:
    def loud(x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.dropout(x, 0.5) * 1e6).to(HALF)

    compiled = torch.compile(loud)
    drawn = []

    def run() -> None:
        torch.manual_seed(7)
        with torch.no_grad():
            drawn.append([compiled(torch.ones(64)) for _ in range(2)] + [torch.rand(2)])

    stats = seen_in(run)
    torch.compiler.reset()
    run()

    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))
    (site,) = (site for site in stats.sites if site.cast)
    dropped = sum(int((value == 0).sum()) for value in drawn[0][:2])
    assert (site.zeros, site.overflowed) == (dropped, 128 - dropped)


def test_many_calls_add_up_as_few_do() -> None:
    """More calls than are kept apart: sums, extremes and the first and last call are those of all of them."""
    feed = [torch.full((4,), float(n + 1)) for n in range(150)]
    feed[100] = LOUD

    stats, _ = cast_of(feed)

    (site,) = (site for site in stats.sites if site.cast)
    assert (site.calls, site.numel, site.first, site.bad, site.last) == (150, 600, 100, 1, False)
    assert (site.amax, site.smallest) == (1e6, 1.0)


def test_levels_measure_more_and_more() -> None:
    model = Block()
    compiled = torch.compile(model)

    def infer() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            compiled(batch(4, 8))

    found = [len(seen_in(infer, model, level=level).sites) for level in Level]

    assert found == sorted(found)
    assert len(set(found)) == len(found)
