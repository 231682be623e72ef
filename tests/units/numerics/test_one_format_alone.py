"""Models that run in one 16-bit format alone, or that Python cannot copy: they are judged as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import torch
from torch import Tensor, nn

from ampcheck.audit import audit
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Finding, Run, Verdict
from ampcheck.core.subject import Subject
from ampcheck.torchtools.copying import prepare

LIBRARY = torch.library.Library("ampcheck_one_format", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")


def _twice(x: Tensor) -> Tensor:
    if x.dtype is not torch.bfloat16:
        raise RuntimeError("twice: bfloat16 alone")
    return x * 2


LIBRARY.impl("twice", _twice, "CPU")


@torch.library.custom_op("ampcheck_one_format::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


tripled.register_autograd(lambda ctx, gradient: gradient * 3)


class Body(nn.Module):
    """A layer and what follows it."""

    def __init__(self, after: Callable[[nn.Linear, Tensor], Tensor], attribute: object = None) -> None:
        super().__init__()
        self.layer, self.after, self.attribute = nn.Linear(8, 8), after, attribute

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer, self.layer(x))


def overflowing(layer: nn.Linear, y: Tensor) -> Tensor:
    return (y * 1e6).softmax(-1)


def casting(layer: nn.Linear, y: Tensor) -> Tensor:
    table = layer.weight.bfloat16()
    with torch.autocast("cpu", enabled=False):
        return y @ table


def asserting(layer: nn.Linear, y: Tensor) -> Tensor:
    assert y.dtype is torch.bfloat16
    return y


def calling(layer: nn.Linear, y: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.ampcheck_one_format.twice(y)


def without_gradients(layer: nn.Linear, y: Tensor) -> Tensor:
    if y.requires_grad:
        raise NotImplementedError("no backward on this device")
    return y * 2


def judged(model: nn.Module, dtype: torch.dtype = torch.float32) -> Run:
    torch.manual_seed(0)
    return audit((model.to(dtype), (torch.randn(4, 8).to(dtype),)), compile=False)


def failures(run: Run) -> list[Finding]:
    return list(run.of(Verdict.FAIL))


def line_of(finding: Finding) -> str:
    return Path(__file__).read_text(encoding="utf-8").splitlines()[(finding.where.line or 1) - 1].strip()


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (casting, "table = layer.weight.bfloat16()"),
        (asserting, "assert y.dtype is torch.bfloat16"),
        (calling, "return torch.ops.ampcheck_one_format.twice(y)"),
    ],
)
def test_a_model_that_runs_under_one_autocast_dtype_alone_fails_in_the_other(after, line):
    found = failures(judged(Body(after)))
    assert [(f.check, line_of(f)) for f in found] == [("low-precision-error", line)]
    assert "what runs under autocast to bfloat16 must run in float16" in found[0].message


@pytest.mark.parametrize("after", [asserting, calling])
def test_a_model_of_bfloat16_alone_is_judged_in_it(after):
    assert failures(judged(Body(after), torch.bfloat16)) == []


def test_a_model_that_raises_in_every_format_is_refused():
    def after(layer: nn.Linear, y: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(UsageError, match="raises in float32 too, in forward"):
        judged(Body(after))


@pytest.mark.parametrize("trained", [False, True])
def test_where_forward_refuses_gradients_the_values_are_judged_without(trained):
    run = judged(Body(without_gradients).requires_grad_(trained), torch.bfloat16)
    assert failures(run) == []
    (gradients,) = [f for f in run.findings if f.check == "nonfinite-gradient"]
    assert gradients.verdict is (Verdict.INCOMPLETE if trained else Verdict.SKIP)
    assert "no backward on this device" in gradients.message

    def both(layer: nn.Linear, y: Tensor) -> Tensor:
        return overflowing(layer, without_gradients(layer, y))

    found = failures(judged(Body(both), torch.float16))
    assert [(f.check, line_of(f)) for f in found] == [("overflow", "return (y * 1e6).softmax(-1)")]


ATTRIBUTES: dict[str, Callable[[IO[str]], object]] = {
    "lock": lambda file: threading.Lock(),
    "locks": lambda file: {"a": [threading.RLock(), threading.Lock()]},
    "file": lambda file: file,
    "generator": lambda file: (i for i in range(3)),
    "custom op": lambda file: tripled,
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_what_cannot_be_copied_is_shared_and_the_model_is_judged(name):
    with open(__file__, encoding="utf-8") as file:
        assert failures(judged(Body(lambda layer, y: y, ATTRIBUTES[name](file)), torch.float16)) == []
        found = failures(judged(Body(overflowing, ATTRIBUTES[name](file)), torch.float16))
    assert "overflow" in {f.check for f in found}


def test_a_cache_with_a_lock_is_copied_around_the_lock():
    class Cache:
        def __init__(self) -> None:
            self.lock, self.values = threading.Lock(), torch.zeros(8)

    model = Body(lambda layer, y: y, Cache())
    copied = prepare(Subject((model, (torch.randn(4, 8),)))).root
    assert copied.attribute is not model.attribute
    assert copied.attribute.lock is model.attribute.lock
    assert copied.attribute.values is not model.attribute.values
    assert copied.layer.weight is not model.layer.weight
