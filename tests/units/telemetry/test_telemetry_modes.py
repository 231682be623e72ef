"""Every way of compiling a model is looked into alike: what is seen carries the names that the user gave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from telemetry_models import Block, Stack, batch, in_phase, modules, seen_in, step
from torch import nn
from torch.utils.checkpoint import checkpoint

# Dynamo's own: it asks a value that one graph hands to the next for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

BLOCK = {"up", "down"}


class Pair(nn.Module):
    """Two layers with whatever a subclass puts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Broken(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x.float() * 2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return (grads[0].float() * 2).to(grads[0].dtype)


class Custom(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)


class Checkpointed(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(lambda value: self.first(value).exp(), x, use_reentrant=False))


class Tied(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight


class Normed(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Dropped(Pair):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("model", "graphs"), [(Broken, 4), (Custom, 2), (Tied, 2)], ids=["graph break", "autograd function", "tied weights"]
)
def test_both_layers_are_seen_in_forward_and_backward(model: type[Pair], graphs: int) -> None:
    ours = model()
    compiled = torch.compile(ours)

    stats = seen_in(lambda: step(compiled, batch(4, 8)), ours)

    assert {"first", "second"} <= modules(stats, "forward")
    assert {"first", "second"} <= modules(stats, "backward")
    assert (stats.graphs, stats.calls, stats.measured) == (graphs, graphs, graphs)


@pytest.mark.parametrize(
    "how",
    [
        {"fullgraph": True, "dynamic": True},
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"epilogue_fusion": False, "shape_padding": False}},
    ],
    ids=str,
)
def test_any_mode_and_options_of_the_user_are_kept_and_looked_into(how: dict[str, Any]) -> None:
    model = Block()
    compiled = torch.compile(model, **how)

    def calls() -> None:
        for rows in (4, 6) if how.get("dynamic") else (4,):
            step(compiled, batch(rows, 8))

    stats = seen_in(calls, model)

    assert modules(stats, "forward") >= BLOCK
    assert modules(stats, "backward") >= BLOCK
    assert stats.graphs == 2
    assert {site.calls for site in stats.sites} == {2 if how.get("dynamic") else 1}
    if how.get("dynamic"):
        product = next(site for site in in_phase(stats, "forward") if site.where.module == "up" and not site.cast)
        assert product.numel == (4 + 6) * 16


def test_a_recompile_for_a_new_shape_is_seen_as_the_same_values() -> None:
    model = Block()
    compiled = torch.compile(model, dynamic=False)

    stats = seen_in(lambda: [step(compiled, batch(rows, 8)) for rows in (4, 6)], model)

    assert stats.graphs == 4
    assert {site.calls for site in stats.sites} == {2}


def test_a_dimension_that_the_user_marked_is_dynamic_and_seen() -> None:
    model = Block()
    compiled = torch.compile(model)
    marked = batch(4, 8)
    torch._dynamo.mark_dynamic(marked, 0)

    stats = seen_in(lambda: [step(compiled, x) for x in (marked, batch(9, 8))], model)

    assert (stats.graphs, stats.measured) == (2, 4)


def test_what_a_checkpoint_recomputes_is_told_as_forward() -> None:
    model = Checkpointed()
    compiled = torch.compile(model)

    stats = seen_in(lambda: step(compiled, batch(4, 8), dtype=torch.float16), model)

    recomputed = [s for s in stats.sites if s.where.module == "first" and s.where.op in ("aten::addmm", "aten::linear")]
    assert [(site.where.phase, site.calls) for site in recomputed] == [("forward", 2)], "once again in backward"
    assert {"first", "second"} <= modules(stats, "backward")


def test_blocks_that_share_one_graph_are_told_apart_in_forward_and_backward() -> None:
    model = Stack(depth=3)
    with torch.no_grad():
        for factor, block in enumerate(model.blocks, 1):
            block.down.weight.mul_(10.0**factor)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block)

    stats = seen_in(lambda: [step(model, batch(4, 8)) for _ in range(2)], model)

    # The blocks compile to one forward and backward; the last block's input needs a gradient as well as the others'.
    assert stats.graphs < 6
    for number in range(3):
        block = model.blocks[number]._orig_mod
        weight = next(site for site in stats.sites if site.weight == f"blocks.{number}.down.weight")
        assert weight.amax == block.down.weight.abs().max().item()
        products = [s for s in in_phase(stats, "backward") if s.where.module == f"blocks.{number}.down" and not s.cast]
        # Both steps accumulate the same gradient, which a factor of 2 leaves exact.
        assert block.down.weight.grad.abs().max().item() / 2 in {site.amax for site in products}


def test_a_function_around_a_module_is_seen() -> None:
    model = Block()
    compiled = torch.compile(lambda x: model(x) * 2)

    stats = seen_in(lambda: step(compiled, batch(4, 8)), model)

    assert modules(stats, "forward") >= BLOCK
    assert modules(stats, "backward") >= BLOCK


def test_a_module_compiled_in_place_is_seen_and_without_gradients_there_is_no_backward() -> None:
    model = Block()
    model.compile()

    def infer() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(batch(4, 8))

    stats = seen_in(infer, model)

    assert modules(stats, "forward") >= BLOCK
    assert not in_phase(stats, "backward")
    assert stats.graphs == 1


def test_buffers_that_the_graph_writes_are_written_once() -> None:
    model, plain = Normed(), Normed()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model)
    losses = []

    seen_in(lambda: losses.extend(step(compiled, batch(4, 8)) for _ in range(2)), model)

    torch.compiler.reset()
    uninstrumented = torch.compile(plain)
    assert losses == [step(uninstrumented, batch(4, 8)) for _ in range(2)]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert model.norm.num_batches_tracked == 2


def test_dropout_draws_what_it_draws_without_the_statistics() -> None:
    model = Dropped()
    compiled = torch.compile(model)
    draws = []

    def run() -> None:
        torch.manual_seed(3)
        draws.append((step(compiled, batch(4, 8)), step(compiled, batch(4, 8)), torch.rand(())))

    seen_in(run, model)
    torch.compiler.reset()
    run()

    assert draws[0] == draws[1]


def test_a_model_that_is_not_watched_is_left_alone_even_where_it_shares_the_graph() -> None:
    watched, other = Block(), Block()
    with torch.no_grad():
        other.down.weight.fill_(1000.0)
    ours, theirs = torch.compile(watched), torch.compile(other)

    def run() -> None:
        step(theirs, batch(4, 8))
        step(ours, batch(4, 8))
        step(theirs, batch(4, 8))

    stats = seen_in(run, watched)

    assert {site.calls for site in stats.sites} == {1}
    assert stats.measured == 2
    assert max(site.amax for site in stats.sites) < 1000


def test_several_calls_before_one_backward_belong_to_whom_they_were_made_by() -> None:
    model = Stack(depth=2)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block)
    first, second = model.blocks

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            same = batch(4, 8)
            out = first(same) + second(same) + first(batch(4, 8, seed=2))
        out.float().square().mean().backward()

    stats = seen_in(run, model)

    calls = {(site.where.phase, site.where.module.split(".")[1], site.calls) for site in stats.sites if not site.weight}
    assert calls == {("forward", "0", 2), ("forward", "1", 1), ("backward", "0", 2), ("backward", "1", 1)}


def test_blocks_that_share_a_table_are_told_apart_by_what_is_their_own() -> None:
    class Shifted(nn.Module):
        def __init__(self, table: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("table", table)
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x + self.table)

    table = torch.zeros(8)
    model = nn.Sequential(Shifted(table), Shifted(table))
    for number, block in enumerate(model):
        model[number] = torch.compile(block)

    def infer() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(batch(4, 8))

    stats = seen_in(infer, model)

    assert {site.weight for site in stats.sites} >= {"0.layer.weight", "1.layer.weight"}


def test_two_threads_that_train_with_one_graph_are_told_apart() -> None:
    model = Stack(depth=2)
    compiled = [torch.compile(block) for block in model.blocks]

    def run() -> None:
        for block in compiled:
            step(block, batch(4, 8))  # compilation is no matter of threads here
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda block: [step(block, batch(4, 8)) for _ in range(20)], compiled))

    stats = seen_in(run, model)

    assert stats.graphs == 2
    assert {site.calls for site in stats.sites} == {21}
    assert modules(stats, "backward") == {f"blocks.{n}{part}" for n in range(2) for part in ("", ".up", ".down")}
