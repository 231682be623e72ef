"""A Sinkhorn kernel exp(-cost / eps) is zero in a whole row of float16.

Mechanism: costs of 2 over an eps of 0.1 give e^-20; the row sum is 0 and the scaling divides by it.
Source: no single report; written from the mechanism.
Expected: overflow at `sinkhorn`.
"""

import torch
from torch import nn

ID = "sinkhorn_kernel_vanishes"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "sinkhorn"}


class Sinkhorn(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, cost):
        kernel = (-(cost.float() if self.wide else cost) / 0.1).exp()
        for _ in range(3):
            kernel = kernel / kernel.sum(-1, keepdim=True)
            kernel = kernel / kernel.sum(-2, keepdim=True)
        return kernel


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.cost, self.sinkhorn = nn.Linear(4, 4), Sinkhorn(wide)

    def forward(self, x, far):
        return self.sinkhorn(self.cost(x).sigmoid() + far)


def inputs():
    torch.manual_seed(1)
    return torch.randn(4, 4).half(), torch.tensor([[0.0], [0.5], [2.0], [0.1]]).half()


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
