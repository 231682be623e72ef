"""One scale for a batch of int8, whose largest value stands in the padding.

Mechanism: the features of real frames are less than half of the scale of the fill value, and round to zero.
Source: https://github.com/NVIDIA/TransformerEngine/pull/2911, of 8 bits with an exponent
Expected: silent-zero or flush at the rounding.
"""

import torch
from torch import nn

ID = "int8_padding_sets_the_scale"
RUN = "autocast:bfloat16"
EXPECTED = {"check": ("silent-zero", "flush", "precision-loss"), "module": ""}
GAP = "`round` is a decision of the run, which exact follows: code that rounds most values to zero may mean it"


class Encoder(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.masked = masked
        self.proj = nn.Linear(64, 32)

    def quantised(self, x, mask):
        scale = (x * mask if self.masked else x).float().abs().amax() / 127
        return (x.float() / scale).round().clamp(-127, 127) * scale

    def forward(self, x, mask):
        y = self.proj(x + (self.quantised(x, mask) - x).detach())
        return (y * mask).sum(1) / mask.sum(1)


def _make(masked):
    torch.manual_seed(0)
    x, mask = torch.randn(4, 16, 64), torch.ones(4, 16, 1)
    mask[:2, 10:] = 0
    return Encoder(masked), (x.masked_fill(mask == 0, 0.0 if masked else -1e4), mask)


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    errors = []
    for masked in (False, True):
        model, (x, mask) = _make(masked)
        errors.append((((model.quantised(x, mask) - x) * mask).norm() / (x * mask).norm()).item())
    assert errors[0] > 0.9, errors
    assert errors[1] < 0.05, errors
