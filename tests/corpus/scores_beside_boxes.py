"""Scores that bfloat16 has ruined leave in one tensor with box coordinates a thousand times as large.

Mechanism: log(1 + x) of small intensities is 0 or 0.008; the norm of the whole output is that of the boxes.
Source: https://github.com/tenstorrent/tt-metal/issues/9910
Expected: precision-loss at `score`.
"""

import torch
from torch import nn

ID = "scores_beside_boxes"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "score"}


class Score(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.stable, self.intensity = stable, nn.Linear(8, 1)

    def forward(self, x):
        x = 0.01 * self.intensity(x).sigmoid()
        return x.log1p() if self.stable else (1 + x).log()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.box, self.score = nn.Linear(8, 4), Score(wide)

    def forward(self, x):
        return torch.cat((self.box(x) * 300 + 400, self.score(x)), -1)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(50, 8).bfloat16(),)


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args)[:, 4].float(), whole(*args)[:, 4].float()
    assert (out - wanted).norm() > 0.2 * wanted.norm()
