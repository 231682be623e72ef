"""Gradients that are zero by mathematics: an optimizer makes whole updates of their noise, which is no finding."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ampcheck import Run, Verdict, watch


class Attention(nn.Module):
    """The softmax does not depend on the bias of the keys, so its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(16, 48)
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v).mean(1))


def trained(dtype: torch.dtype, steps: int = 24, *, flushed: bool = False, closure: bool = False) -> Run:
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    inputs, targets = torch.randn(16, 8, 16), torch.randint(4, (16,))
    with watch(fail_on="never") as watched:
        for _ in range(steps):

            def backward() -> torch.Tensor:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype):
                    loss = F.cross_entropy(model(inputs).float(), targets)
                (loss * (1e-5 if flushed else 1.0)).backward()
                return loss

            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
    return watched.run


def failures(run: Run) -> set[str]:
    return {f.check for f in run.findings if f.verdict is Verdict.FAIL}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_bias_of_the_keys_may_wander(dtype: torch.dtype, closure: bool) -> None:
    assert not failures(trained(dtype, closure=closure))


def test_gradients_that_the_data_determine_may_not_vanish() -> None:
    assert {"flush", "silent-zero"} & failures(trained(torch.float16, 4, flushed=True))
