"""A normalised update is rescaled by a ratio of norms: 0 / 0 where the gradient of a matrix is zero.

Mechanism: NaN in every precision; no format mends it, and it is no overflow.

Source: https://github.com/microsoft/dion/pull/24
Expected: nonfinite-reference.
"""

import torch
from torch import nn

ID = "normalised_update_of_zero_gradient"
KIND = "call"
EXPECTED = {"check": "nonfinite-reference"}


class NorMuon(torch.optim.Optimizer):
    def __init__(self, params, lr, floor):
        super().__init__(params, {"lr": lr})
        self.floor = floor

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                u = p.grad
                v = self.state[p].setdefault("v", torch.zeros(p.shape[0], 1))
                v.mul_(0.95).add_(u.square().mean(-1, keepdim=True), alpha=0.05)
                n = u / (v.sqrt() + 1e-8)
                below = n.norm()
                if self.floor:
                    below = below.clamp(min=1e-8)
                p.sub_(n * (u.norm() / below), alpha=group["lr"])


def _train(floor, steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False))
    nn.init.zeros_(model[2].weight)
    opt = NorMuon(model.parameters(), 0.02, floor)
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    for _ in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        opt.step()
    return loss.item()


def buggy():
    _train(False)


def fixed():
    _train(True)


def manifests():
    b, f = _train(False), _train(True)
    assert b != b
    assert f == f
    return f"loss {b}, fixed {f:.3f}"
