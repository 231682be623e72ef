"""Every op of forward and backward is told with its module, source line, phase and dtypes; nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampcheck.stream.trace import Trace, TracedOp


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).exp()  # the line of exp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _traced(model: nn.Module, autocast: torch.dtype | None = torch.bfloat16) -> list[TracedOp]:
    with Trace(model) as trace:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = model(torch.randn(3, 4)).float().sum()
        loss.backward()
    return trace.events


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _of(events: list[TracedOp], op: str, phase: str) -> Iterator[TracedOp]:
    return (event for event in events if event.where.op == op and event.where.phase == phase)


def test_an_op_is_told_with_its_module_and_the_users_line() -> None:
    events = list(_of(_traced(Net()), "aten::exp", "forward"))
    assert [event.where.module for event in events] == ["blocks.0", "blocks.1"]
    assert all(event.where.file.endswith("test_trace.py") for event in events)
    assert all(event.where.line == Block.forward.__code__.co_firstlineno + 1 for event in events)


def test_dtypes_are_those_that_really_ran_below_autocast() -> None:
    (first, _) = _of(_traced(Net()), "aten::addmm", "forward")
    assert set(first.inputs) == {torch.bfloat16}
    assert first.outputs == (torch.bfloat16,)
    (first, _) = _of(_traced(Net(), autocast=None), "aten::addmm", "forward")
    assert set(first.inputs) == {torch.float32}


def test_a_backward_op_is_led_back_to_the_forward_op_it_belongs_to() -> None:
    events = _traced(Net())
    assert [e.where.module for e in _of(events, "aten::native_layer_norm_backward", "backward")] == [
        "blocks.1.norm",
        "blocks.0.norm",
    ]
    gelu = [
        e
        for e in events
        if e.where.phase == "backward" and e.where.op == "aten::mul.Tensor" and e.where.line is not None
    ]
    assert {e.where.line for e in gelu} == {Block.forward.__code__.co_firstlineno + 1}  # exp backward is a mul


def test_a_checkpoint_that_recomputes_its_forward_keeps_the_module() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    recomputed = list(_of(_traced(Checkpointed()), "aten::exp", "backward"))
    assert [event.where.module for event in recomputed] in (
        ["blocks.1", "blocks.0"],
        [],
    )  # early stop may skip the last op
    assert {e.where.module for e in _traced(Checkpointed()) if e.where.phase == "backward"} >= {
        "blocks.0.norm",
        "blocks.1.norm",
    }


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_hooks_and_modes_never_leak_also_when_the_model_raises(where: str) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            if where == "forward":
                raise RuntimeError("planted")
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise RuntimeError("planted")

    class Bad(Net):
        def forward(self, x: Tensor) -> Tensor:
            return Breaks.apply(super().forward(x))

    model = Bad()
    with pytest.raises(RuntimeError, match="planted"):
        _traced(model)
    assert _hooks(model) == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    with Trace(model) as trace:  # the next trace starts from the root again
        torch.ones(1).exp()
    assert [event.where.module for event in trace.events if event.where.op == "aten::exp"] == [""]


def test_an_op_that_raises_is_named() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).addmm_(torch.ones(3, 4), torch.ones(4, 4))

    model = nn.Sequential(Bad())
    with pytest.raises(RuntimeError), Trace(model) as trace, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(3, 4))
    assert trace.failed is not None
    assert (trace.failed.where.module, trace.failed.where.op) == ("0", "aten::addmm_")


def test_tracing_changes_no_number() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 4)
    plain = model(x)
    with Trace(model):
        traced = model(x)
    assert torch.equal(plain, traced)
