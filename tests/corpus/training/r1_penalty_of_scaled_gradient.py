"""The R1 penalty is made of a scaled gradient: its weight is multiplied by the square of the loss scale.

Mechanism: autograd.grad(scaler.scale(out.sum()), x, create_graph=True) is squared as it is.
Source: https://github.com/pytorch/pytorch/pull/44667
Expected: scale-invariance.
"""

import torch
from torch import nn

ID = "r1_penalty_of_scaled_gradient"
EXPECTED = {"check": "scale-invariance"}


def _make(unscale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x = torch.randn(16, 4)

    def step(i):
        optimizer.zero_grad()
        real = x.clone().requires_grad_()
        out = model(real)
        (grad,) = torch.autograd.grad(scaler.scale(out.sum()), real, create_graph=True)
        if unscale:
            grad = grad / scaler.get_scale()
        loss = nn.functional.softplus(-out).mean() + 10 * grad.square().sum(1).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return nn.functional.softplus(-out).mean().item()

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    b["step"](0)
    f["step"](0)

    def g(c):
        return c["model"][0].weight.grad.norm().item()

    assert g(b) > 500 * g(f)
