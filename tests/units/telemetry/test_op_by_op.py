"""Statistics that are computed beside a compiled graph: what they see, and what they leave as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from telemetry_models import Stack, batch, step
from torch import fx

from ampcheck.core.run import Where
from ampcheck.records.telemetry import TelemetryStats
from ampcheck.telemetry import op_by_op
from ampcheck.telemetry.accumulators import GraphAccumulators
from ampcheck.telemetry.op_by_op import OpByOp, layout_of
from ampcheck.telemetry.sites import Level, Site
from ampcheck.telemetry.statistics import Layout
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools.interception import LoweredGraph

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims


class Accumulator:
    """Keeps the packed statistics as they come."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def add(self, call: int, packed: torch.Tensor) -> None:
        self.seen.append(packed)


def graph_of(build: Callable[[fx.Graph, fx.Node], fx.Node]) -> tuple[fx.GraphModule, fx.Node]:
    """A graph of one float32 input and the node that `build` returns; nodes have the dtypes that PyTorch gives them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    last = build(graph, x)
    graph.output((last,))
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda argument: argument.meta["val"]))
    return fx.GraphModule(torch.nn.Module(), graph), last


def site(*, cast: bool) -> Site:
    return Site("", Where("forward", op="aten::mm"), "float16", cast)


def seen_beside(build: Callable[[fx.Graph, fx.Node], fx.Node], value: torch.Tensor, *, cast: bool) -> dict[str, float]:
    """The statistics of the value that `build` returns, by their names."""
    accumulator, (module, last) = Accumulator(), graph_of(build)
    sites = {last: site(cast=cast)}
    beside = OpByOp(lambda inputs: inputs, module, sites, never, frozenset())
    beside.run([value], 0, accumulator)
    assert not beside.failure, beside.failure
    (packed,) = accumulator.seen
    return {name: float(number) for (_, name), number in zip(layout_of(sites).entries, packed, strict=True)}


def never() -> Any:
    raise AssertionError("nothing more is compiled")


def only_compiled(x: torch.Tensor) -> torch.Tensor:
    """An op that runs while the graph is made, and not on the values of the tests."""
    if float(x[0]) == 7.0:
        raise NotImplementedError("no kernel")
    return x


def telemetry_of(run: Callable[[], object], *roots: torch.nn.Module, aside: bool) -> TelemetryStats:
    torch.compiler.reset()
    telemetry = Telemetry(roots, level=Level.CASTS, aside=aside)
    with telemetry.watching():
        run()
    return telemetry.read()


def test_a_value_that_a_fused_kernel_keeps_in_a_register_is_not_rounded() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        low = graph.call_function(_PRIMS.convert_element_type.default, (x, torch.float16))
        doubled = graph.call_function(_ATEN.add.Tensor, (low, low))
        return graph.call_function(_ATEN.sum.dim_IntList, (doubled, [0], True))

    seen = seen_beside(build, torch.full((4,), 40000.0), cast=True)
    assert seen["amax"] == 320000.0, "in float16 the sum of two is infinite already"
    assert (seen["kept"], seen["finite"]) == (0, 1), "its own cast overflows"


def test_a_value_that_a_library_reads_is_rounded_to_its_dtype() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        low = graph.call_function(_PRIMS.convert_element_type.default, (x, torch.float16))
        doubled = graph.call_function(_ATEN.add.Tensor, (low, low))
        return graph.call_function(_ATEN.dot.default, (doubled, low))

    seen = seen_beside(build, torch.full((4,), 40000.0), cast=False)
    assert (seen["kept"], seen["number"]) == (0, 1), "infinite, and no NaN"


def test_bits_are_reinterpreted_in_the_dtype_that_has_them() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        low = graph.call_function(_PRIMS.convert_element_type.default, (x, torch.float16))
        return graph.call_function(_ATEN.view.dtype, (low, torch.int16))

    assert seen_beside(build, torch.ones(4), cast=True)["amax"] == float(torch.ones(1).half().view(torch.int16))


def test_every_class_of_values_is_counted() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(_ATEN.neg.default, (x,))

    # Of float16: zero, rounds to zero, subnormal, in range, overflows, infinite, NaN.
    values = torch.tensor([0.0, 2.0**-26, 2.0**-20, 1.0, 70000.0, math.inf, math.nan])
    seen = seen_beside(build, values, cast=True)
    assert (seen["amax"], seen["smallest"]) == (70000.0, 2.0**-26)
    counts = {"zero": 1, "lost": 2, "tiny": 3, "kept": 4, "finite": 5, "number": 6}
    assert {name: seen[name] for name in counts} == counts


def test_results_are_those_of_the_compiled_graph_and_inputs_and_random_numbers_serve_both() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        noise = graph.call_function(_ATEN.rand_like.default, (x,))
        total = graph.call_function(_ATEN.add_.Tensor, (x, noise))
        return graph.call_function(_ATEN.clone.default, (total,))

    def plain(inputs: list[Any]) -> Sequence[Any]:
        return (inputs[0].add_(torch.rand_like(inputs[0])) * 3,)

    accumulator, (module, last) = Accumulator(), graph_of(build)
    torch.manual_seed(1)
    expected = torch.ones(4) + torch.rand(4)
    torch.manual_seed(1)
    given = torch.ones(4)
    beside = OpByOp(plain, module, {last: site(cast=True)}, never, frozenset((0,)))
    (out,) = beside.run([given], 0, accumulator)
    assert torch.equal(out, expected * 3)
    assert torch.equal(given, expected), "what the graph writes to is written once"
    assert float(accumulator.seen[0][0]) == float(expected.max()), "measured with equal inputs and random numbers"


def test_statistics_are_read_whatever_default_device_the_run_has_left() -> None:
    accumulators = GraphAccumulators((site(cast=False),), Layout(((0, "amax"), (0, "smallest")), (4,)))
    accumulators.of(0).add(0, torch.tensor([3.0, 1.0], dtype=torch.float64))
    with torch.device("meta"):
        (seen,) = accumulators.read({})
    assert (seen.amax, seen.smallest) == (3.0, 1.0)


def test_a_graph_with_an_op_that_only_the_compiler_knows_is_compiled_with_its_statistics() -> None:
    def compiled(inputs: list[Any]) -> Sequence[Any]:
        return inputs[0], inputs[0].double()

    accumulator, (module, last) = Accumulator(), graph_of(lambda graph, x: graph.call_function(only_compiled, (x,)))
    beside = OpByOp(lambda inputs: (inputs[0],), module, {last: site(cast=True)}, lambda: compiled, frozenset())
    for call in range(2):
        beside.run([torch.full((4,), 7.0)], call, accumulator)
    assert [packed.tolist() for packed in accumulator.seen] == [[7.0] * 4] * 2
    assert not beside.unseen()


def test_statistics_that_can_be_computed_in_no_way_are_reported_and_the_run_goes_on() -> None:
    def failing() -> Any:
        raise RuntimeError("the compiler fails on it too")

    accumulator, (module, last) = Accumulator(), graph_of(lambda graph, x: graph.call_function(only_compiled, (x,)))
    beside = OpByOp(lambda inputs: (inputs[0],), module, {last: site(cast=True)}, failing, frozenset())
    for call in range(2):
        (out,) = beside.run([torch.full((4,), 7.0)], call, accumulator)
        assert out.tolist() == [7.0] * 4
    assert not accumulator.seen
    assert "fails on it too" in str(beside.unseen())


def test_an_op_without_a_kernel_costs_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = batch(16, 8), Stack()
    whole = telemetry_of(lambda: step(torch.compile(model), x, dtype=torch.float16), model, aside=True)

    def fails(self: object, inputs: object) -> torch.Tensor:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(op_by_op._Registers, "statistics", fails)
    compiled = telemetry_of(lambda: step(torch.compile(model), x, dtype=torch.float16), model, aside=True)
    assert not compiled.unseen
    _equal_counts(compiled, whole)


def test_beside_the_graph_the_same_is_seen_as_inside_and_every_graph_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def counted(how: str) -> Callable[..., Any]:
        original = getattr(LoweredGraph, how)

        def wrapped(self: LoweredGraph, *args: Any) -> Any:
            compiled.append(how)
            return original(self, *args)

        return wrapped

    for how in ("compiled", "variant"):
        monkeypatch.setattr(LoweredGraph, how, counted(how))
    x = batch(16, 8)
    model = Stack()
    inside = telemetry_of(lambda: step(torch.compile(model), x, dtype=torch.float16, scale=64.0), model, aside=False)
    assert compiled == ["compiled", "variant"] * 2
    compiled.clear()
    beside = telemetry_of(lambda: step(torch.compile(model), x, dtype=torch.float16, scale=64.0), model, aside=True)
    assert compiled == ["compiled"] * 2
    _equal_counts(beside, inside)


def _equal_counts(stats: TelemetryStats, others: TelemetryStats) -> None:
    assert [site.key for site in stats.sites] == [site.key for site in others.sites]
    counts = ("calls", "numel", "overflowed", "infs", "nans", "bad", "born", "emptied")
    for seen, other in zip(stats.sites, others.sites, strict=True):
        assert [getattr(seen, name) for name in counts] == [getattr(other, name) for name in counts]
        assert seen.amax == pytest.approx(other.amax, rel=1e-2)
        assert seen.subnormals == pytest.approx(other.subnormals, abs=0.02 * seen.numel)
