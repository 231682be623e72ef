"""A KL divergence divides by a probability that float16 made zero.

Mechanism: p * log(p / q) with q = 0 is infinite; float32 has q = 1e-11 and gives 20.
Source: no single report; written from the mechanism.
Expected: overflow at `divergence`, of what became zero.
"""

import torch
from torch import nn

ID = "divergence_by_quotient"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "divergence"}


class Divergence(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.stable = stable

    def forward(self, a, b):
        p = a.softmax(-1)
        if self.stable:
            return (p * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1)
        return (p * (p / b.softmax(-1)).log()).sum(-1)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher, self.divergence = nn.Linear(3, 4), nn.Linear(3, 4), Divergence(wide)
        with torch.no_grad():
            self.teacher.bias.copy_(torch.tensor([12.0, 0, -1, -13]))

    def forward(self, x):
        return self.divergence(self.student(x), self.teacher(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 3).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
