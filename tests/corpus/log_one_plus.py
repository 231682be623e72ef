"""log(1 + x) of small intensities in bfloat16.

Mechanism: 1 + 0.003 rounds to 1 and its logarithm to 0; log1p keeps it.
Source: https://github.com/tenstorrent/tt-metal/issues/9910
Expected: precision-loss at `compress`.
"""

import torch
from torch import nn

ID = "log_one_plus"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "precision-loss", "module": "compress"}


class Compress(nn.Module):
    def __init__(self, stable):
        super().__init__()
        self.stable = stable

    def forward(self, x):
        return x.log1p() if self.stable else torch.log(1 + x)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.filters, self.compress, self.norm = nn.Linear(16, 8), Compress(wide), nn.LayerNorm(8)
        with torch.no_grad():
            self.filters.weight.abs_().mul_(0.02)
            self.filters.bias.zero_()

    def forward(self, x):
        return self.norm(self.compress(self.filters(x)))


def inputs():
    torch.manual_seed(1)
    return (torch.rand(4, 16),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    with torch.autocast("cpu", torch.bfloat16):
        out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.2 * wanted.norm()
    assert (wanted - whole(*args)).norm() < 0.05 * wanted.norm()
