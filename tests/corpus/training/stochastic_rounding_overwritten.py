"""The stochastically rounded weight is overwritten by the next line, which rounds to nearest.

Mechanism: the second copy has all updates below half of the spacing, which it loses.

Source: https://github.com/Nerogar/OneTrainer/issues/994
Expected: stagnation.
"""

import torch
from torch import nn

ID = "stochastic_rounding_overwritten"
KIND = "call"
EXPECTED = {"check": "stagnation"}


def put_stochastic(target, source):
    bits = source.view(torch.int32) + torch.randint(0, 1 << 16, source.shape, dtype=torch.int32)
    target.copy_((bits & -65536).view(torch.float32))


class Factor(torch.optim.Optimizer):
    def __init__(self, params, lr, twice):
        self.twice = twice
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                w, g = p.float(), p.grad.float()
                s = self.state[p]
                s["v"] = s.get("v", torch.zeros_like(w)).mul(0.9).add(g.square(), alpha=0.1)
                w.sub_(group["lr"] * g / (s["v"].sqrt() + 1e-12))
                if p.dtype == torch.bfloat16:
                    put_stochastic(p, w)
                if self.twice or p.dtype != torch.bfloat16:
                    p.copy_(w)


def _train(twice, steps=24):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).bfloat16()
    for p in model.parameters():
        nn.init.uniform_(p, 0.1, 0.3)
    opt = Factor(model.parameters(), 1e-5, twice)
    x, y = torch.randn(64, 32).bfloat16(), torch.randn(64, 8)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        opt.zero_grad()
        nn.functional.mse_loss(model(x).float(), y).backward()
        opt.step()
    return sum((p != s).sum().item() for p, s in zip(model.parameters(), start, strict=True))


def buggy():
    _train(True)


def fixed():
    _train(False)


def manifests():
    b, f = _train(True), _train(False)
    assert b == 0
    assert f > 100
    return f"{b} weights changed in 24 steps, {f} with the first rounding kept"
