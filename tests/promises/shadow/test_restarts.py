"""An overflow stays one, whatever op follows it: no op whose results restart from the real values heals it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampcheck import Verdict, audit


@torch.library.custom_op("ampcheck_tests::only_float32", mutates_args=())
def only_float32(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise RuntimeError("float32 only")
    return x.clone()


FOLLOWING: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda z: z,
    "round": torch.round,
    "round in place": lambda z: z.clone().round_(),
    "floor": torch.floor,
    "floor division": lambda z: z.div(3, rounding_mode="floor"),
    "a random op": lambda z: torch.normal(z, torch.ones_like(z)),
    "an op without a rule": lambda z: only_float32(z.float()),
    "a number": lambda z: z.new_full((3,), z.max().item()),
}


class Overflowing(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Tensor:
        y = (self.layer(x) * 1e3).half()
        return self.then(y * y).float()


@pytest.mark.parametrize("then", FOLLOWING.values(), ids=FOLLOWING)
def test_an_overflow_fails_whatever_op_follows_it(then: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    run = audit((Overflowing(then), torch.randn(2, 4) * 10), compile=False, dtype="float16", checks=["overflow"])
    (found,) = [f for f in run.findings if f.check == "overflow" and f.verdict is Verdict.FAIL]
    assert found.where.op == "aten::mul.Tensor"
