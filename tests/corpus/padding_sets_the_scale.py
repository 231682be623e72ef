"""One scale for a batch of 8 bits, whose largest value stands in the padding.

Mechanism: the features of real frames, divided by the scale of the fill value, are below the subnormals of the format.
Source: https://github.com/NVIDIA/TransformerEngine/pull/2911
Expected: flush at the cast to float8_e4m3fn.
"""

import torch
from torch import nn

ID = "padding_sets_the_scale"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "flush", "module": "", "op": "aten::_to_copy"}


class Encoder(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.masked = masked
        self.proj = nn.Linear(64, 32)

    def quantised(self, x, mask):
        amax = (x * mask if self.masked else x).float().abs().amax()
        scale = 448 / amax
        return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale

    def forward(self, x, mask):
        y = self.proj(x + (self.quantised(x, mask) - x).detach())
        return (y * mask).sum(1) / mask.sum(1)


def _make(masked):
    torch.manual_seed(0)
    x, mask = torch.randn(4, 16, 64), torch.ones(4, 16, 1)
    mask[:2, 10:] = 0
    return Encoder(masked), (x.masked_fill(mask == 0, 0.0 if masked else -1e9), mask)


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
