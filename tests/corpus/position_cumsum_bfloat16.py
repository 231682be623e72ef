"""Positions counted by a cumulative sum of a bfloat16 mask stand still after 256.

Mechanism: the attention mask has the dtype of the model, and so has its cumulative sum; beyond 256 neighbouring
tokens share an index into the position table.
Source: https://github.com/lucidrains/vector-quantize-pytorch/issues/114
Expected: integer-cast at `positions`.
"""

import torch
from torch import nn

ID = "position_cumsum_bfloat16"
RUN = "native"
EXPECTED = {"check": "integer-cast", "module": "positions"}


class Positions(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.table = wide, nn.Embedding(600, 8)

    def forward(self, mask):
        count = (mask.long() if self.wide else mask).cumsum(1)
        return self.table((count - 1).clamp(min=0).long())


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.head = Positions(wide), nn.Linear(8, 8)

    def forward(self, x, mask):
        return self.head(x + self.positions(mask))


def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 512, 8).bfloat16(), torch.ones(1, 512).bfloat16()


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, (_, mask)), (whole, _) = buggy(), fixed()
    assert not torch.equal(broken.positions(mask)[0, 300:], whole.positions(mask)[0, 300:])
    assert torch.equal(broken.positions(mask)[0, :250], whole.positions(mask)[0, :250])
