"""Compiled code of reported models: a place for its overflows, and no blame for what eager mode makes NaN."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcheck import Finding, Run, Verdict, audit

DATA = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def failures(run: Run) -> list[Finding]:
    return [f for f in run.findings if f.verdict in (Verdict.FAIL, Verdict.WARN)]


def line_with(text: str) -> int:
    lines = linecache.getlines(__file__)
    return next(number for number, line in enumerate(lines, 1) if text in line)


class SharedMaximum(nn.Module):
    """https://github.com/pytorch/pytorch/issues/195214: a quotient that is not rounded beside its rounded maximum."""

    def __init__(self, safe: bool) -> None:
        super().__init__()
        self.safe, self.proj = safe, nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.proj(x) / 8.49
        if self.safe:
            top = scaled.argmax(-1, keepdim=True)
            return torch.zeros_like(scaled).scatter(-1, top, 1.0) * scaled
        ties = (scaled == scaled.amax(-1, keepdim=True)).to(x.dtype)
        return ties / ties.sum(-1, keepdim=True) * scaled


class InverseDistance(nn.Module):
    """The distance to the nearest is zero in eager mode, and shares its kernel with the sum in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.proj(x) / 7.3
        nearest = (scaled >= scaled.amax(-1, keepdim=True)).to(x.dtype)
        return scaled.sum(-1, keepdim=True) / nearest.sum(-1, keepdim=True)


def shared(model: nn.Module) -> Any:
    return model.bfloat16(), (torch.randn(64, 16).bfloat16(),)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: SharedMaximum(False), "return ties / ties.sum"),
        (InverseDistance, "return scaled.sum(-1"),
    ],
)
def test_an_overflow_of_compiled_code_alone_names_the_op_in_its_graph(make: Any, line: str) -> None:
    torch.manual_seed(0)
    run = audit(shared(make()))
    first = next(f for f in failures(run) if f.check == "overflow")
    assert (first.where.op, first.where.line) == ("aten::div.Tensor", line_with(line))
    beside = next(f for f in failures(run) if f.check == "compiled-error")
    assert beside.where.line == first.where.line


def test_a_maximum_that_is_an_index_passes_compiled() -> None:
    torch.manual_seed(0)
    assert failures(audit(shared(SharedMaximum(True)))) == []


class Orthogonal(nn.Module):
    """https://github.com/deepspeedai/DeepSpeed/pull/8533: a scaled gradient is cast before it is normalised."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, gradient: Tensor) -> Tensor:
        if self.first:
            x = (gradient / (gradient.norm() + 1e-7)).half()
        else:
            x = gradient.half()
            x = x / (x.norm() + 1e-7)
        for _ in range(2):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        return x.float()


class Rows(nn.Module):
    """Eager mode makes one row NaN, and the other is compared."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.half()
        x = x / (x.norm(dim=-1, keepdim=True) + 1e-7)
        return x.float() * torch.linspace(0.5, 1.5, 32)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (Orthogonal(False), DATA * 3e4),
        (Rows(), DATA * torch.tensor([[1e5], *[[1.0]] * 15])),
    ],
)
def test_what_eager_mode_makes_nan_is_the_affair_of_eager_mode(model: nn.Module, data: Tensor) -> None:
    run = audit((model, (data,)), dtype="float16")
    found = [(f.check, f.verdict) for f in failures(run)]
    assert ("overflow", Verdict.FAIL) in found
    assert not [check for check, verdict in found if check in ("compiled-error", "compiled-gradient")]


def test_a_gradient_that_is_normalised_before_its_cast_passes() -> None:
    assert failures(audit((Orthogonal(True), (DATA * 3e4,)), dtype="float16")) == []


class Experts(nn.Module):
    """A mixture whose tokens are gathered by expert, in a loop: Dynamo declines the whole of it."""

    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        kind = Counted if wrong else Expert
        self.experts = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).float().softmax(-1).topk(2, -1)
        y = torch.zeros_like(x, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]).float() * weights[rows, places, None])
        return y


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Counted(Expert):
    """Its backward multiplies in 16 bits where it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        y = self[1](self[0](x))
        with torch.autocast("cpu", enabled=False):
            return self[2](y.float())


@pytest.mark.parametrize("wrong", [False, True])
def test_the_parts_are_judged_where_dynamo_declines_the_whole(wrong: bool) -> None:
    torch.manual_seed(0)
    run = audit((Experts(wrong=wrong), (torch.randn(64, 16),)), dtype="bfloat16")
    assert [f.check for f in failures(run)] == (["compiled-gradient"] if wrong else [])
    assert run.coverage.seen["graphs"] >= 1
    assert wrong or any("whose parts were compiled" in reason for reason in run.coverage.unseen)


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise ValueError("only compiled")
        return self.layer(x)


def test_an_exception_that_dynamo_alone_meets_is_a_warning() -> None:
    run = audit((Traced(), (torch.randn(4, 8),)), dtype="bfloat16")
    assert [(f.check, f.verdict) for f in failures(run)] == [("compiled-exception", Verdict.WARN)]
