"""Ops that compiled code computes in 16 bits, and eager mode in float32: found at their line, at any error."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcheck.compiled.accuracy.comparison import lowered_ops
from ampcheck.compiled.accuracy.judge import judge_accuracy
from ampcheck.core.plan import Plan
from ampcheck.core.run import Finding, Run, Verdict, Where

CHECKS = ("compiled-error", "compiled-gradient")


class Island(nn.Module):
    """pytorch/pytorch#179804 behind rounded data: the bound of its gradient is that of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.inner(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(y.float())


class Between(Island):
    """Rounded data before it and behind it, and a product of no module."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        with torch.autocast("cpu", enabled=False):
            y = y.float() @ self.inner.weight
        return self.head(y)


class Double(torch.autograd.Function):
    """A product in float32, whose backward autocast does not reach in eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return x.float() @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (gradient @ weight.t()).to(x.dtype), x.float().t() @ gradient


class Custom(Island):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(Double.apply(self.inner(x), self.inner.weight))


class Plain(Island):
    """Without an island; softmax and norm compute in float32 on their own, and their decompositions as well."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(self.inner(x), (16,)).softmax(-1) * x.float()
        return self.head(F.silu(y) + torch.exp(-y.float().square()))


class Frozen(Island):
    """An island without a product in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        with torch.autocast("cpu", enabled=False):
            y = (y.float() * 3).tanh().exp() + y.detach().float() @ self.inner.weight.detach()
        return self.head(y)


class Inside(Island):
    """Autocast is entered inside of what is compiled, and left before its backward is traced."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def judged(model: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> Run:
    torch.manual_seed(0)
    return judge_accuracy(Plan.of((model, (torch.randn(8, 16),)), checks=CHECKS), dtype=dtype)


def failures(run: Run) -> list[Finding]:
    return [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]


def line_of(call: Callable[..., Any], text: str) -> int:
    source = linecache.getlines(call.__code__.co_filename)
    return next(n for n, line in enumerate(source, 1) if n > call.__code__.co_firstlineno and text in line)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Island, line_of(Island.forward, "self.head(")),
        (Between, line_of(Between.forward, " @ self")),
        (Custom, line_of(Double.backward, "return")),
    ],
)
def test_a_backward_in_16_bits_of_code_that_eager_mode_differentiates_in_float32_fails(
    kind: Callable[[], nn.Module], line: int
) -> None:
    torch.manual_seed(0)
    (found,) = failures(judged(kind()))
    assert (found.check, found.where.phase, found.where.op) == ("compiled-gradient", "backward", "aten::mm")
    assert found.where.line == line
    assert "tried, and it passes" in found.hint


@pytest.mark.parametrize("kind", [Plain, Frozen])
def test_ops_that_compiled_code_takes_apart_are_no_lower_than_in_eager_mode(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert failures(judged(kind())) == []


def test_autocast_inside_of_what_is_compiled_does_not_reach_its_backward() -> None:
    torch.manual_seed(0)
    assert failures(judged(Inside(), None)) == []


def at(op: str, module: str = "", phase: str = "backward", line: int = 3) -> Where:
    return Where(phase, module, op, "model.py", line)


def test_ops_of_one_line_are_told_apart_by_their_modules_where_the_graph_names_the_same() -> None:
    eager = {at("mm", "layers.0"): False, at("mm", "layers.1"): True}
    assert lowered_ops(eager, [at("mm", "layers.0"), at("mm", "layers.1")]) == (at("mm", "layers.0"),)
    assert lowered_ops(eager, [at("mm", "0"), at("mm")]) == ()
    assert lowered_ops(eager, [at("bmm", "layers.0"), at("mm", phase="forward"), at("mm", line=4)]) == ()
    assert lowered_ops({at("mm", "layers.0"): False}, [at("mm", "0")]) == (at("mm"),)
