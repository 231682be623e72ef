"""A sum over time steps is kept in bfloat16 and stops growing.

Mechanism: at 256 the spacing is 2 and adding 0.6 changes nothing.
Source: no single report; written from the mechanism.
Expected: precision-loss at `accumulate`.
"""

import torch
from torch import nn

ID = "running_sum_bfloat16"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "accumulate"}


class Accumulate(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        total = x.new_zeros(x.shape[0], x.shape[2], dtype=torch.float32 if self.wide else x.dtype)
        for step in x.unbind(1):
            total = total + step
        return total / x.shape[1]


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.energy, self.accumulate = nn.Linear(4, 4), Accumulate(wide)
        with torch.no_grad():
            self.energy.bias.fill_(0.4)

    def forward(self, x):
        return self.accumulate(self.energy(x).sigmoid())


def inputs():
    torch.manual_seed(1)
    return (0.1 * torch.randn(1, 1500, 4).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.3 * wanted.norm()
