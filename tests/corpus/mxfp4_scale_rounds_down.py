"""The scale of an MXFP4 block, 2^(floor(log2(amax)) - 2), leaves values up to 8 for a format that ends at 6.

Mechanism: the largest value of such a block becomes 6 times the scale, up to a quarter less.
Source: https://github.com/pytorch/ao/issues/2035
Expected: overflow or precision-loss where codes are chosen.
"""

import torch
from torch import nn

ID = "mxfp4_scale_rounds_down"
RUN = "autocast:bfloat16"
EXPECTED = {"check": ("overflow", "precision-loss"), "module": ""}
GAP = "codes from a table are decisions of the run, which exact follows: only the code knows that the table has an end"
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Mx(nn.Module):
    def __init__(self, up):
        super().__init__()
        self.up, self.proj = up, nn.Linear(64, 32)

    def quantised(self, x):
        blocks = x.float().unflatten(-1, (2, 32))
        amax = blocks.abs().amax(-1, keepdim=True)
        scale = torch.exp2(torch.ceil(torch.log2(amax / 6)) if self.up else torch.floor(torch.log2(amax)) - 2)
        unit = blocks / scale
        nearest = (unit.detach().abs().unsqueeze(-1) - GRID).abs().argmin(-1)
        return (GRID[nearest] * unit.sign() * scale).flatten(-2)

    def forward(self, x):
        return self.proj(x + (self.quantised(x) - x).detach())


def _make(up):
    torch.manual_seed(0)
    x = torch.randn(16, 64)
    x[:, ::32] = 7.7 + 0.2 * torch.rand(16, 2)  # outliers decide the scale
    return Mx(up), (x,)


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    errors = []
    for up in (False, True):
        model, (x,) = _make(up)
        errors.append(((model.quantised(x) - x) / x)[:, ::32].abs().max().item())
    assert errors[0] > 0.2, errors
    assert errors[1] < 0.1, errors
