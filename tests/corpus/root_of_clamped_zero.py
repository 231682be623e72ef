"""A distance matrix is clamped to 1e-12 before its root; in float16 that is zero.

Mechanism: the distance of a sample to itself is zero; the backward of the root divides its zero gradient by zero.
Source: https://github.com/Cysu/open-reid/blob/master/reid/loss/triplet.py
Expected: silent-zero at `loss`, in the clamp that keeps nothing from being zero.
"""

import torch
from torch import nn

ID = "root_of_clamped_zero"
RUN = "native"
UNTIL = ("2.14", "the gradient of clamp at its limit is 1")
EXPECTED = {"check": "silent-zero", "module": "loss", "op": "aten::clamp"}


class ContrastiveLoss(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, features, labels):
        if self.wide:
            features = features.float()
        squares = (features[:, None] - features[None]).square().sum(-1)
        distance = squares.clamp(min=1e-12).sqrt()
        same = labels[:, None] == labels[None]
        return torch.where(same, distance.square(), (1 - distance).relu().square()).mean()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.loss = nn.Linear(8, 8), ContrastiveLoss(wide)

    def forward(self, x, labels):
        return self.loss(self.encode(x), labels)


def inputs():
    torch.manual_seed(1)
    return torch.randn(6, 8).half(), torch.arange(6) // 2


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def gradient(subject):
    model, args = subject
    model(*args).backward()
    return model.encode.weight.grad


def manifests():
    assert gradient(buggy()).isnan().any()
    assert gradient(fixed()).isfinite().all()
