"""A bfloat16 result is assigned into a float32 tensor through a mask.

Mechanism: under autocast the projection gives bfloat16, and index_put_ wants the dtypes of both sides to agree.
Source: no single report; written from the mechanism.
Expected: low-precision-error at `fill`.
"""

import pytest
import torch
from torch import nn

ID = "masked_assignment"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "low-precision-error", "module": "fill"}


class Fill(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.project = wide, nn.Linear(8, 8)

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        given = self.project(x[chosen])
        out[chosen] = given.to(out.dtype) if self.wide else given
        return out


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fill = nn.LayerNorm(8), Fill(wide)

    def forward(self, x, chosen):
        return x + self.fill(self.norm(x), chosen)


def inputs():
    torch.manual_seed(1)
    return torch.randn(6, 8), torch.arange(6) % 2 == 0


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    assert broken(*args).isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert whole(*args).isfinite().all()
        with pytest.raises(RuntimeError, match="dtypes match"):
            broken(*args)
