"""Token counts above 2048 are kept in float16 and lose their last bit before a ratio near 1 is taken.

Mechanism: 4097 / 4096 - 1 is 2.4e-4 in exact arithmetic and 0 in float16.
Source: no single report; written from the mechanism.
Expected: integer-cast at `drift`.
"""

import torch
from torch import nn

ID = "count_ratio_in_half"
RUN = "native"
EXPECTED = {"check": "integer-cast", "module": "drift"}


class Drift(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.gain = wide, nn.Parameter(torch.full((1,), 1000.0))

    def forward(self, now, before):
        dtype = torch.float32 if self.wide else self.gain.dtype
        return (now.to(dtype) / before.to(dtype) - 1).to(self.gain.dtype) * self.gain


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        self.drift = Drift(wide)

    def forward(self, now, before):
        return self.drift(now, before)


def inputs():
    before = torch.arange(4001, 4033)
    return before + 3, before


def buggy():
    return Model().half(), inputs()


def fixed():
    return Model(wide=True).half(), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args).float(), whole(*args).float()
    assert (out - wanted).norm() > 0.2 * wanted.norm()
