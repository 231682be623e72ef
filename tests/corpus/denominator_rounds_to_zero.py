"""1 - alpha of a nearly full alpha is zero in bfloat16, and a division by it overflows.

Mechanism: sigmoid(7) = 0.9991 rounds to 1.
Source: https://github.com/fastino-ai/GLiNER2/pull/155
Expected: overflow at `odds`, of what rounds to zero.
"""

import torch
from torch import nn

ID = "denominator_rounds_to_zero"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "overflow", "module": "odds"}


class Odds(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.stable = stable

    def forward(self, logits):
        if self.stable:
            return logits.float().exp()
        p = logits.sigmoid()
        return p / (1 - p)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.odds = nn.Linear(4, 4), Odds(wide)
        nn.init.constant_(self.head.bias, 7.0)

    def forward(self, x):
        return self.odds(self.head(x))


def inputs():
    torch.manual_seed(1)
    return (torch.randn(6, 4),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    with torch.autocast("cpu", torch.bfloat16):
        assert not broken(*args).isfinite().all()
        assert whole(*args).isfinite().all()
