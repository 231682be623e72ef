"""A sign optimizer with a small learning rate moves none of the bfloat16 weights.

Mechanism: Lion adds lr * sign(...), 1e-5, to weights of about 0.1.
Source: https://github.com/meta-pytorch/torchtune/issues/2254
Expected: stagnation.
"""

import torch
from torch import nn

ID = "sign_updates_in_bfloat16"
EXPECTED = {"check": "stagnation"}


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-5, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                p.add_(torch.sign(m * group["betas"][0] + p.grad * (1 - group["betas"][0])), alpha=-group["lr"])
                m.mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])


def _make(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(dtype)
    optimizer = Lion(model.parameters())
    x = torch.randn(16, 16).to(dtype)

    def step(i):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), torch.arange(16) % 4)
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


def buggy():
    return _make(torch.bfloat16)


def fixed():
    return _make(torch.float32)


def manifests():
    b, f = buggy(), fixed()
    w = b["model"][0].weight.clone()
    wf = f["model"][0].weight.clone()
    for i in range(10):
        b["step"](i)
        f["step"](i)
    assert (b["model"][0].weight == w).float().mean() > 0.9
    assert (f["model"][0].weight != wf).float().mean() > 0.9
