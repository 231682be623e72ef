"""The scales of NVFP4 blocks, amax / 6, are clamped to the smallest normal float8_e4m3fn; the tensor has no scale.

Mechanism: the scale of every block of small weights is that floor, 2^-6, so that most of them round to zero.
Source: https://github.com/pytorch/ao/pull/2604 and https://github.com/vllm-project/vllm/pull/34577
Expected: precision-loss at the clamp of the scale.
"""

import torch
from torch import nn
from torch.nn import functional as F

ID = "fp4_scale_raised_to_floor"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "precision-loss", "module": "", "op": "aten::clamp"}
E4M3 = torch.finfo(torch.float8_e4m3fn)
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class BlockLinear(nn.Module):
    def __init__(self, two_levels):
        super().__init__()
        self.two_levels = two_levels
        self.weight = nn.Parameter(torch.randn(32, 64) * 2e-3)

    def quantised(self):
        blocks = self.weight.float().view(32, 4, 16)
        whole = blocks.abs().amax() / (6 * 448) if self.two_levels else torch.ones(())
        scale = blocks.abs().amax(-1, keepdim=True) / 6 / whole
        scale = scale.clamp(min=E4M3.tiny, max=E4M3.max).to(torch.float8_e4m3fn).float()
        unit = blocks * ((1 / whole) / scale)
        nearest = (unit.detach().abs().unsqueeze(-1) - GRID).abs().argmin(-1)
        return (GRID[nearest] * unit.sign() * scale * whole).view_as(self.weight)

    def forward(self, x):
        return F.linear(x, self.weight + (self.quantised() - self.weight).detach())


def _make(two_levels):
    torch.manual_seed(0)
    return BlockLinear(two_levels), (torch.randn(8, 64),)


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    errors = []
    for two_levels in (False, True):
        model, _ = _make(two_levels)
        errors.append(((model.quantised() - model.weight).norm() / model.weight.norm()).item())
    assert errors[0] > 0.6, errors
    assert errors[1] < 0.15, errors
