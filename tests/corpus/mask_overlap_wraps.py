"""Overlaps of binary masks are products of matrices in uint8, which end at 255 pixels and begin again at zero.

Mechanism: an overlap of 700 pixels is 188, and the union, a sum that PyTorch makes in int64, is too large with it.
Source: https://github.com/ultralytics/ultralytics/issues/15782
Expected: overflow at `overlap`.
"""

import torch
from torch import nn

ID = "mask_overlap_wraps"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "overlap"}


class Overlap(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.gain = wide, nn.Parameter(torch.ones(1))

    def forward(self, masks, truth):
        if self.wide:
            masks, truth = masks.float(), truth.float()
        inside = masks @ truth.T
        union = masks.sum(1)[:, None] + truth.sum(1) - inside
        return self.gain * (inside / union)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        self.overlap = Overlap(wide)

    def forward(self, masks, truth):
        return self.overlap(masks, truth)


def inputs():
    torch.manual_seed(0)
    return tuple((torch.randn(count, 48 * 48) > 0).to(torch.uint8) for count in (5, 3))


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    out, wanted = broken(*args), whole(*args)
    assert (out - wanted).norm() > 0.2 * wanted.norm()
