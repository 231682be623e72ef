"""A focal loss takes the logarithm of a probability that float16 made zero.

Mechanism: sigmoid(-20) is 2e-9, zero in float16; log gives -inf where float32 gives -20.
Source: https://github.com/facebookresearch/fvcore/pull/113
Expected: overflow at `loss`, of what became zero.
"""

import torch
from torch import nn

ID = "focal_log_of_zero"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "loss"}


class FocalLoss(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, logits, target):
        p = (logits.float() if self.wide else logits).sigmoid()
        hit, miss = (1 - p).square() * p.log(), p.square() * (1 - p).log()
        return -torch.where(target, hit, miss).mean()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        self.head, self.loss = nn.Linear(3, 1), FocalLoss(wide)
        with torch.no_grad():
            self.head.weight.fill_(1.0)

    def forward(self, x, target):
        return self.loss(self.head(x).squeeze(-1), target)


def inputs():
    x = torch.tensor([[-10.0, -9, -1], [1, 0.5, 0.2], [-1, 0, 0.5]])
    return x.half(), torch.tensor([True, True, False])


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
