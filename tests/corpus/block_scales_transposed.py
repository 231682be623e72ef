"""The table of the scales of square blocks is transposed before the weights are divided by it.

Mechanism: of a square weight the shapes agree; blocks that get the scale of smaller ones saturate in float8_e4m3fn.
Source: https://github.com/vllm-project/vllm/pull/50204
Expected: overflow at the cast to float8_e4m3fn.
"""

import torch
from torch import nn
from torch.nn import functional as F

ID = "block_scales_transposed"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "overflow", "module": "", "op": "aten::_to_copy"}


class BlockLinear(nn.Module):
    def __init__(self, transposed):
        super().__init__()
        self.transposed = transposed
        sizes = torch.logspace(-1, 1, 4).repeat_interleave(32)
        self.weight = nn.Parameter(torch.randn(128, 128) * sizes.unsqueeze(1) / 12)

    def quantised(self):
        blocks = self.weight.float().view(4, 32, 4, 32)
        scale = blocks.abs().amax((1, 3)) / 448
        scale = (scale.T if self.transposed else scale)[:, None, :, None]
        return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view_as(self.weight)

    def forward(self, x):
        return F.linear(x, self.weight + (self.quantised() - self.weight).detach())


def _make(transposed):
    torch.manual_seed(0)
    return BlockLinear(transposed), (torch.randn(8, 128),)


def buggy():
    return _make(True)


def fixed():
    return _make(False)


def manifests():
    errors = []
    for transposed in (True, False):
        model, _ = _make(transposed)
        errors.append(((model.quantised() - model.weight).norm() / model.weight.norm()).item())
    assert errors[0] > 0.5, errors
    assert errors[1] < 0.05, errors
