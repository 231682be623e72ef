"""Relative positions are put into logarithmic buckets in bfloat16.

Mechanism: log(distance / 8) / log(16) * 8 in bfloat16 falls just short of the whole number at which a bucket begins,
and truncation moves those distances into the bucket before.
Source: https://github.com/mindspore-lab/mindone/pull/670
Expected: precision-loss at `bias`, where buckets fall otherwise.
"""

import math

import torch
from torch import nn

ID = "bucket_log_in_half"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "bias"}


class RelativeBias(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.table = wide, nn.Embedding(16, 2)
        nn.init.normal_(self.table.weight)

    def forward(self, length):
        distance = torch.arange(length)
        wide = distance.clamp(min=1).to(torch.float32 if self.wide else self.table.weight.dtype)
        far = 8 + (torch.log(wide / 8) / math.log(16) * 8).long()
        return self.table(torch.where(distance < 8, distance, far.clamp(max=15)))


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.bias, self.scores = RelativeBias(wide), nn.Linear(8, 2)

    def forward(self, x):
        return (self.scores(x) + self.bias(x.shape[1])).softmax(-1)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 128, 8).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    broken, whole = buggy()[0].bias(128), fixed()[0].bias(128)
    assert (broken != whole).any(-1).sum() > 1, (broken != whole).any(-1).sum()
