"""Statistics that are computed beside a compiled graph: what they see, and what they leave as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from telemetry_models import Stack, batch, step
from torch import fx

from ampcheck.telemetry.op_by_op import OpByOp
from ampcheck.telemetry.sites import Level
from ampcheck.telemetry.stats import TelemetryStats
from ampcheck.telemetry.telemetry import Telemetry
from ampcheck.torchtools.interception import LoweredGraph

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims


class Accumulator:
    """Keeps the packed statistics as they come."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def add(self, call: int, packed: torch.Tensor, *, full: bool) -> None:
        assert full
        self.seen.append(packed)


def graph_of(
    build: Callable[[fx.Graph, fx.Node], Sequence[fx.Node]], dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """A graph of one input; what `build` returns are its outputs. Nodes have the dtypes that PyTorch gives them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, dtype=dtype)
    graph.output(tuple(build(graph, x)))
    for node in graph.nodes:
        if node.op == "call_function":
            args = fx.node.map_arg(node.args, lambda argument: argument.meta["val"])
            node.meta["val"] = node.target(*args)
    return fx.GraphModule(torch.nn.Module(), graph)


def seen_beside(module: fx.GraphModule, value: torch.Tensor) -> torch.Tensor:
    accumulator = Accumulator()
    beside = OpByOp(lambda inputs: inputs, module, never, frozenset())
    beside.run([value], 0, accumulator)
    assert not beside.failure, beside.failure
    (packed,) = accumulator.seen
    return packed


def never() -> Any:
    raise AssertionError("nothing more is compiled")


def telemetry_of(run: Callable[[], object], *roots: torch.nn.Module, aside: bool) -> TelemetryStats:
    torch.compiler.reset()
    telemetry = Telemetry(roots, level=Level.CASTS, aside=aside)
    with telemetry.watching():
        run()
    return telemetry.read()


def test_a_value_that_a_fused_kernel_keeps_in_a_register_is_not_rounded() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> Sequence[fx.Node]:
        low = graph.call_function(_PRIMS.convert_element_type.default, (x, torch.float16))
        doubled = graph.call_function(_ATEN.add.Tensor, (low, low))
        total = graph.call_function(_ATEN.sum.dim_IntList, (doubled, [0], True))
        return (graph.call_function(_PRIMS.convert_element_type.default, (total, torch.float64)),)

    packed = seen_beside(graph_of(build), torch.full((4,), 40000.0))
    assert packed.tolist() == [320000.0], "in float16 each sum of two would be infinite"


def test_a_value_that_a_library_reads_is_rounded_to_its_dtype() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> Sequence[fx.Node]:
        low = graph.call_function(_PRIMS.convert_element_type.default, (x, torch.float16))
        doubled = graph.call_function(_ATEN.add.Tensor, (low, low))
        product = graph.call_function(_ATEN.dot.default, (doubled, low))
        return (graph.call_function(_PRIMS.convert_element_type.default, (product, torch.float64)),)

    packed = seen_beside(graph_of(build), torch.full((4,), 40000.0))
    assert packed.isinf().all()


def test_bits_are_reinterpreted_in_the_dtype_that_has_them() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> Sequence[fx.Node]:
        low = graph.call_function(_PRIMS.convert_element_type.default, (x, torch.float16))
        return (graph.call_function(_ATEN.view.dtype, (low, torch.int16)),)

    assert torch.equal(seen_beside(graph_of(build), torch.ones(4)), torch.ones(4).half().view(torch.int16))


def test_results_are_those_of_the_compiled_graph_and_inputs_and_random_numbers_serve_both() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> Sequence[fx.Node]:
        noise = graph.call_function(_ATEN.rand_like.default, (x,))
        total = graph.call_function(_ATEN.add_.Tensor, (x, noise))
        return (graph.call_function(_ATEN.clone.default, (total,)),)

    def plain(inputs: list[Any]) -> Sequence[Any]:
        return (inputs[0].add_(torch.rand_like(inputs[0])) * 3,)

    accumulator, module = Accumulator(), graph_of(build)
    torch.manual_seed(1)
    expected = torch.ones(4) + torch.rand(4)
    torch.manual_seed(1)
    given = torch.ones(4)
    (out,) = OpByOp(plain, module, never, frozenset((0,))).run([given], 0, accumulator)
    assert torch.equal(out, expected * 3)
    assert torch.equal(given, expected), "what the graph writes to is written once"
    assert torch.equal(accumulator.seen[0], expected), "measured with equal inputs and random numbers"


def test_a_graph_with_an_op_that_only_the_compiler_knows_is_compiled_with_its_statistics() -> None:
    def unknown(x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and float(x[0]) == 7.0:
            raise NotImplementedError("no kernel")
        return x

    def compiled(inputs: list[Any]) -> Sequence[Any]:
        return inputs[0], inputs[0].double()

    accumulator = Accumulator()
    module = graph_of(lambda graph, x: (graph.call_function(unknown, (x,)),))
    beside = OpByOp(lambda inputs: (inputs[0],), module, lambda: compiled, frozenset())
    for call in range(2):
        beside.run([torch.full((4,), 7.0)], call, accumulator)
    assert [packed.tolist() for packed in accumulator.seen] == [[7.0] * 4] * 2
    assert not beside.unseen()


def test_statistics_that_can_be_computed_in_no_way_are_reported_and_the_run_goes_on() -> None:
    def unknown(x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and float(x[0]) == 7.0:
            raise NotImplementedError("no kernel")
        return x

    def failing() -> Any:
        raise RuntimeError("the compiler fails on it too")

    accumulator = Accumulator()
    module = graph_of(lambda graph, x: (graph.call_function(unknown, (x,)),))
    beside = OpByOp(lambda inputs: (inputs[0],), module, failing, frozenset())
    for call in range(2):
        (out,) = beside.run([torch.full((4,), 7.0)], call, accumulator)
        assert out.tolist() == [7.0] * 4
    assert not accumulator.seen
    assert "fails on it too" in str(beside.unseen())


@pytest.mark.slow
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
    assert [site.key for site in beside.sites] == [site.key for site in inside.sites]
    counts = ("calls", "numel", "overflowed", "infs", "nans", "bad", "born", "emptied")
    for one, other in zip(beside.sites, inside.sites, strict=True):
        assert [getattr(one, name) for name in counts] == [getattr(other, name) for name in counts]
        assert one.amax == pytest.approx(other.amax, rel=1e-2)
        assert one.subnormals == pytest.approx(other.subnormals, abs=0.02 * one.numel)
