"""The deviation of constant frames is guarded with 1e-9, which is zero in float16, before a root.

Mechanism: sqrt(clamp(variance, 1e-9)) is sqrt(0) with an infinite gradient; the forward pass looks fine.
Source: https://github.com/TaoRuijie/ECAPA-TDNN/issues/83
Expected: silent-zero at `pool`.
"""

import torch
from torch import nn

ID = "statistics_pool_deviation"
RUN = "native"
UNTIL = ("2.14", "the gradient of clamp at its limit is 1")
EXPECTED = {"check": "silent-zero", "module": "pool"}


class StatisticsPool(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        y = x.float() if self.wide else x
        mean = y.mean(1, keepdim=True)
        deviation = (y - mean).square().mean(1).clamp(min=1e-9).sqrt()
        return torch.cat((mean.squeeze(1), deviation), -1).to(x.dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.frames, self.pool, self.out = nn.Linear(4, 6), StatisticsPool(wide), nn.Linear(12, 3)

    def forward(self, x):
        return self.out(self.pool(self.frames(x).relu()))


def inputs():
    torch.manual_seed(1)
    x = torch.randn(2, 9, 4)
    x[1] = 0.5
    return (x.half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    broken, args = buggy()
    out = broken(*args)
    out.float().square().mean().backward()
    assert out.isfinite().all()
    assert not broken.frames.weight.grad.isfinite().all()
    whole = fixed()[0]
    whole(*args).float().square().mean().backward()
    assert whole.frames.weight.grad.isfinite().all()
