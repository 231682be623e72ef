"""Float32 statistics beside a bfloat16 input promote the concatenation, and the next layer rejects it.

Mechanism: torch.cat promotes; without autocast the convolution behind it meets float32 with bfloat16 weights.
Source: https://github.com/speechbrain/speechbrain/pull/3081
Expected: low-precision-error at `pool.attention`.
"""

import pytest
import torch
from torch import nn

ID = "statistics_promote_input"
RUN = "native"
EXPECTED = {"check": "low-precision-error", "module": "pool.attention"}


class StatisticsPool(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.attention = wide, nn.Linear(12, 4)

    def forward(self, x):
        mean = x.float().mean(1, keepdim=True).expand_as(x)
        deviation = x.float().std(1, keepdim=True).expand_as(x)
        joined = torch.cat((x, mean, deviation), -1)
        weights = self.attention(joined.to(x.dtype) if self.wide else joined).softmax(1)
        return (weights * x).sum(1)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.pool = nn.Linear(6, 4), StatisticsPool(wide)

    def forward(self, x):
        return self.pool(self.encoder(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 7, 6).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    whole(*args)
    with pytest.raises(RuntimeError, match="dtype"):
        broken(*args)
