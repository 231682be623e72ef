"""1 - 1e-7 is 1 in bfloat16, so a clamp against log(0) does nothing.

Mechanism: a binary cross entropy clamps probabilities to [1e-7, 1 - 1e-7]; the upper bound rounds to 1 and log(1 - p)
is -inf for a confident wrong answer.
Source: https://github.com/fastino-ai/GLiNER2/pull/155
Expected: overflow at `loss`, of what became zero.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "one_minus_eps_is_one"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "loss"}


class CrossEntropy(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, logits, target):
        if self.wide:
            return F.binary_cross_entropy_with_logits(logits.float(), target.float())
        p = logits.sigmoid().clamp(1e-7, 1 - 1e-7)
        return -torch.where(target, p.log(), (1 - p).log()).mean()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        self.head, self.loss = nn.Linear(3, 1), CrossEntropy(wide)
        with torch.no_grad():
            self.head.weight.fill_(1.0)

    def forward(self, x, target):
        return self.loss(self.head(x).squeeze(-1), target)


def inputs():
    x = torch.tensor([[4.0, 3, 2], [1, 0.5, 0.2], [-1, 0, 0.5]])
    return x.bfloat16(), torch.tensor([False, True, False])


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    args = inputs()
    assert not buggy()[0](*args).isfinite().all()
    assert fixed()[0](*args).isfinite().all()
