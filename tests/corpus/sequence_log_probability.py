"""Log-probabilities of a long answer are summed token by token in bfloat16.

Mechanism: at -512 the spacing is 4 and a token of -1.5 is lost; ratios of two such sums are meaningless.
Source: https://github.com/billy-enrizky/openbrowser-ai/pull/63
Expected: precision-loss at `ratio`.
"""

import torch
from torch import nn

ID = "sequence_log_probability"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": "ratio"}


class Ratio(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, new, old):
        if self.wide:
            new, old = new.float(), old.float()
        return (new.sum(-1) - old.sum(-1)).exp()


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.shift, self.ratio = nn.Linear(1, 1), Ratio(wide)
        nn.init.constant_(self.shift.weight, 1.0)
        nn.init.constant_(self.shift.bias, 0.0)

    def forward(self, new, old):
        return self.ratio(self.shift(new[..., None]).squeeze(-1), old)


def inputs():
    torch.manual_seed(1)
    old = -1.5 - torch.rand(4, 400)
    return (old + 0.02 * torch.randn(4, 400)).bfloat16(), old.bfloat16()


def buggy():
    return Model().bfloat16(), inputs()


def fixed():
    return Model(wide=True).bfloat16(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.2 * wanted.norm()
