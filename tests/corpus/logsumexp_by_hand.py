"""A log-sum-exp written out overflows float16 above 11.

Mechanism: exp(12) is 162755; torch.logsumexp subtracts the maximum first.
Source: no single report; written from the mechanism.
Expected: overflow at `partition`, in exp.
"""

import torch
from torch import nn

ID = "logsumexp_by_hand"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "partition", "op": "aten::exp"}


class Partition(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.stable = stable

    def forward(self, energy):
        return energy.logsumexp(-1) if self.stable else energy.exp().sum(-1).log()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        self.energy, self.partition = nn.Linear(4, 16, bias=False), Partition(wide)
        with torch.no_grad():
            self.energy.weight.copy_(torch.linspace(-2, 4, 64).view(16, 4))

    def forward(self, x):
        return self.partition(self.energy(x))


def inputs():
    return (torch.tensor([[1.0, 1, 1, 0.5], [0.1, 0.2, 0.3, 0.4]]).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
