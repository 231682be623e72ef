"""The number of valid elements overflows float16 and the mean becomes zero.

Mechanism: 80,000 ones sum to infinity; a finite sum over infinity is 0, without a NaN anywhere.
Source: https://github.com/ROCm/AMDMIGraphX/issues/850
Expected: overflow at `loss`, in the sum.
"""

import torch
from torch import nn

ID = "count_overflows"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "loss", "op": "aten::sum"}


class MaskedLoss(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x, mask):
        error = (x * mask).abs()
        count = (mask.float() if self.wide else mask).sum()
        return error.sum() / count


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.loss = nn.Linear(1, 1), MaskedLoss(wide)
        with torch.no_grad():
            self.head.weight.fill_(0.4)
            self.head.bias.zero_()

    def forward(self, x, mask):
        return self.loss(self.head(x), mask)


def inputs():
    return torch.linspace(-1, 1, 80000)[:, None].half(), torch.ones(80000, 1).half()


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert buggy()[0](*args) == 0
    assert fixed()[0](*args) > 0.1
