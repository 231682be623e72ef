"""Single-step decays from a cumulative sum are off by three per cent in bfloat16.

Mechanism: at -20 the spacing is 0.125; steps of -0.01 become 0 or -0.125 and the gates average out to nearly the right
size. A projection follows whose own rounding hides it.
Source: https://github.com/lucidrains/gateloop-transformer/pull/4
Expected: precision-loss at `decay`.
"""

import torch
from torch import nn

ID = "decay_short_of_the_limit"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "decay"}
GAP = "only outputs and gradients are judged; the module's own excess drowns in the rounding of the projection"


class Decay(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, log_decay):
        total = (log_decay.float() if self.wide else log_decay).cumsum(1)
        return (total[:, 1:] - total[:, :-1]).exp().to(log_decay.dtype)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.value, self.decay = nn.Linear(8, 8), Decay(wide)

    def forward(self, x, log_decay):
        return self.value(x)[:, 1:] * self.decay(log_decay)


def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 2048, 8).bfloat16(), torch.full((1, 2048, 8), -0.01).bfloat16()


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    log_decay = inputs()[1]
    exact = log_decay[:, 1:].double().exp()
    assert (buggy()[0].decay(log_decay) - exact).abs().max() > 0.05
    assert (fixed()[0].decay(log_decay) - exact).abs().max() < 0.005
