"""Exclusive sums of routing counts are computed in float16 as cumsum - x.

Mechanism: 6000 tokens over experts; slot numbers above 2048 collide, so tokens overwrite one another.
Source: no single report; written from the mechanism.
Expected: integer-cast at `slots`.
"""

import torch
import torch.nn.functional as F
from torch import nn

ID = "exclusive_cumsum_by_subtraction"
RUN = "native"
EXPECTED = {"check": "integer-cast", "module": "slots"}


class Slots(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x, expert):
        dtype = torch.float32 if self.wide else x.dtype
        chosen = F.one_hot(expert, 2).to(dtype)
        slot = ((chosen.cumsum(0) - chosen) * chosen).sum(-1).long()
        out = x.new_zeros(2, len(x), x.shape[-1])
        out[expert, slot] = x
        return out.mean(1)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.slots = nn.Linear(2, 2), Slots(wide)

    def forward(self, x, expert):
        return self.slots(self.embed(x), expert)


def inputs():
    torch.manual_seed(1)
    return torch.rand(6000, 2).half(), torch.arange(6000) % 2


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.05 * wanted.norm()
