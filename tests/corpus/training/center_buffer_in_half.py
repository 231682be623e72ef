"""The centre that a self-distillation loss subtracts is a buffer of a half model and does not follow.

Mechanism: center = center * 0.999 + batch_center * 0.001, rebound each step.
Source: no single report; written from the mechanism.
Expected: stagnation.
"""

import torch
from torch import nn

ID = "center_buffer_in_half"
EXPECTED = {"check": "stagnation"}


class Loss(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("center", torch.ones(1, n))

    def forward(self, student, teacher):
        target = ((teacher - self.center) / 0.1).softmax(-1).detach()
        loss = -(target * (student / 0.1).log_softmax(-1)).sum(-1).mean()
        with torch.no_grad():
            self.center = self.center * 0.999 + teacher.mean(0, keepdim=True).to(self.center.dtype) * 0.001
        return loss


def _make(dtype):
    torch.manual_seed(0)
    model, teacher, criterion = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), Loss(8).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(32, 8)

    def step(i):
        optimizer.zero_grad()
        loss = criterion(model(x), teacher(x))
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "criterion": criterion, "step": step}


def buggy():
    return _make(torch.bfloat16)


def fixed():
    return _make(torch.float32)


def manifests():
    b, f = buggy(), fixed()
    for i in range(300):
        b["step"](i)
        f["step"](i)
    assert (b["criterion"].center == 1).float().mean() > 0.5
    assert (f["criterion"].center != 1).all()
