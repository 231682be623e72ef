"""The scales of NVFP4 blocks of activations, amax / 6, end at 448, without a scale for the tensor.

Mechanism: of a block whose largest value is beyond 2688, all that is larger becomes 2688.
Source: https://github.com/kekzl/imp/issues/1544
Expected: precision-loss at the clamp of the scale.
"""

import torch
from torch import nn

ID = "fp4_scale_ends_at_448"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "precision-loss", "module": "", "op": "aten::clamp"}
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Down(nn.Module):
    def __init__(self, two_levels):
        super().__init__()
        self.two_levels = two_levels
        self.proj = nn.Linear(64, 32)

    def quantised(self, x):
        blocks = x.float().unflatten(-1, (4, 16))
        whole = blocks.abs().amax() / (6 * 448) if self.two_levels else torch.ones(())
        scale = (blocks.abs().amax(-1, keepdim=True) / 6 / whole).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()
        unit = (blocks / whole / scale).clamp(-6, 6)
        nearest = (unit.detach().abs().unsqueeze(-1) - GRID).abs().argmin(-1)
        return (GRID[nearest] * unit.sign() * scale * whole).flatten(-2)

    def forward(self, x):
        return self.proj(x + (self.quantised(x) - x).detach())


def _make(two_levels):
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    x[:, 5] = 8000.0 + 1000 * torch.rand(8)  # massive activations
    return Down(two_levels), (x,)


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    errors = []
    for two_levels in (False, True):
        model, (x,) = _make(two_levels)
        errors.append(((model.quantised(x) - x).norm() / x.norm()).item())
    assert errors[0] > 0.6, errors
    assert errors[1] < 0.1, errors
