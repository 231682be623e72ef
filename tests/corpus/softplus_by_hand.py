"""log(1 + exp(x)) overflows float16 above 11.

Mechanism: a step size of a state space model comes from a softplus that was written out.
Source: https://github.com/sbryngelson/ANEForge/issues/113
Expected: overflow at `step`, in exp.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "softplus_by_hand"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "step", "op": "aten::exp"}


class StepSize(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.stable, self.project = stable, nn.Linear(4, 8)
        with torch.no_grad():
            self.project.bias.copy_(torch.linspace(-4, 13, 8))

    def forward(self, x):
        x = self.project(x)
        return F.softplus(x) if self.stable else (1 + x.exp()).log()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.step, self.out = StepSize(wide), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.step(x))


def inputs():
    return (torch.zeros(2, 4).half(),)


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
