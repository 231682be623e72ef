"""The scales of NVFP4-like blocks, amax / 6, are stored in float8_e4m3fn without a scale for the whole tensor.

Mechanism: those of small weights are below the subnormals of float8_e4m3fn, and whole blocks become zero.
Source: https://github.com/vllm-project/vllm/pull/34577 and https://github.com/kekzl/imp/issues/1544
Expected: flush or silent-zero at the cast to float8_e4m3fn.
"""

import torch
from torch import nn
from torch.nn import functional as F

ID = "block_scale_without_second_level"
RUN = "autocast:bfloat16"
EXPECTED = {"check": ("flush", "silent-zero"), "module": "", "op": "aten::_to_copy"}
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class BlockLinear(nn.Module):
    def __init__(self, two_levels):
        super().__init__()
        self.two_levels = two_levels
        self.weight = nn.Parameter(torch.randn(32, 64) * 2e-3)

    def quantised(self):
        blocks = self.weight.float().view(32, 4, 16)
        whole = blocks.abs().amax() / (6 * 448) if self.two_levels else blocks.new_tensor(1.0)
        scale = (blocks.abs().amax(-1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
        unit = torch.where(scale > 0, blocks / scale.clamp(min=1e-30), 0.0)
        nearest = (unit.detach().abs().unsqueeze(-1) - GRID).abs().argmin(-1)
        return (GRID[nearest] * unit.sign() * scale).view_as(self.weight)

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
