"""Differences of a long cumulative sum of log-decays are lost in bfloat16.

Mechanism: a gated scan sums log-decays along the sequence and takes exp(sum[i] - sum[j]); at -100 the spacing of
bfloat16 is 0.5, and a single step of -0.05 is 0 or -0.5.
Source: https://github.com/pytorch/pytorch/issues/180150
Expected: precision-loss at `decay`.
"""

import torch
from torch import nn

ID = "log_decay_cumsum"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "decay"}


class Decay(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, log_decay):
        total = (log_decay.float() if self.wide else log_decay).cumsum(1)
        before = total.unfold(1, 2, 1)
        return (before[..., 1] - before[..., 0]).exp().to(log_decay.dtype)


class Scan(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.value, self.decay = nn.Linear(8, 8), Decay(wide)

    def forward(self, x, log_decay):
        return self.value(x)[:, 1:] * self.decay(log_decay)


def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 2048, 8).bfloat16(), torch.full((1, 2048, 8), -0.05).bfloat16()


def buggy():
    return Scan().bfloat16(), inputs()


def fixed():
    return Scan(wide=True).bfloat16(), inputs()


def manifests():
    log_decay = inputs()[1]
    exact = log_decay[:, 1:].double().exp()
    assert (buggy()[0].decay(log_decay) - exact).abs().max() > 0.05
    assert (fixed()[0].decay(log_decay) - exact).abs().max() < 0.005
