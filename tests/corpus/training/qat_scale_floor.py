"""Fake quantisation clamps its scale to finfo(bfloat16).eps, 2^-7: weights of small groups all become zero.

Mechanism: the bound is an eps where the smallest normal number was meant, so that it binds for every group.
Source: https://github.com/pytorch/ao/pull/4534
Expected: precision-loss or silent-zero.
"""

import torch
from torch import nn

ID = "qat_scale_floor"
EXPECTED = {"check": ("precision-loss", "silent-zero")}
KIND = "call"


class FakeLinear(nn.Linear):
    floor = "eps"

    def forward(self, x):
        floor = getattr(torch.finfo(torch.bfloat16), self.floor)
        scale = (self.weight.abs().amax(1, keepdim=True) / 7).bfloat16().clamp(min=floor)
        q = (torch.round(self.weight / scale).clamp(-8, 7) * scale).to(self.weight.dtype)
        return nn.functional.linear(x, self.weight + (q - self.weight).detach(), self.bias)


def _train(floor, steps=16):
    torch.manual_seed(0)
    model = nn.Sequential(FakeLinear(256, 64), nn.ReLU(), FakeLinear(64, 4))
    for layer in (model[0], model[2]):
        layer.floor = floor
        nn.init.normal_(layer.weight, std=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    x, y = torch.randn(64, 256), torch.randn(64, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        nn.functional.mse_loss(out.float(), y).backward()
        optimizer.step()
    return model(x).std(0).max().item()


def buggy():
    _train("eps")


def fixed():
    _train("smallest_normal")


def manifests():
    b, f = _train("eps", 1), _train("smallest_normal", 1)
    assert b < 0.05 * f, (b, f)
