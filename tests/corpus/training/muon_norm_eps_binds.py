"""Muon's normalisation has a floor of 1e-7 on the norm of the momentum: below it the update fades away.

Mechanism: small losses give a momentum whose norm is below the floor, in any precision.
Source: https://github.com/NVIDIA-NeMo/Emerging-Optimizers/issues/229 and its pull 230
Expected: precision-loss or stagnation.
"""

import torch
from torch import nn

ID = "muon_norm_eps_binds"
EXPECTED = {"check": ("precision-loss", "stagnation")}
KIND = "call"


def _orthogonal(g, eps, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = nn.functional.normalize(g, p=2, dim=(-2, -1), eps=eps).bfloat16()
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.float()


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, eps):
        super().__init__(params, {"lr": lr})
        self.eps = eps

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(_orthogonal(momentum, self.eps), alpha=group["lr"])


def _train(eps, steps=16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))
    optimizer = Muon(model.parameters(), 0.01, eps)
    x, y = torch.randn(64, 32), torch.randn(64, 16)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        (nn.functional.mse_loss(out.float(), y) * 1e-10).backward()
        optimizer.step()
    return [(p - s).norm().item() for p, s in zip(model.parameters(), start, strict=True)]


def buggy():
    _train(1e-7)


def fixed():
    _train(1e-30)


def manifests():
    b, f = _train(1e-7), _train(1e-30)
    assert max(b) < 0.5 * max(f), (b, f)
