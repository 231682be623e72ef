"""LoRA adapters are created in the dtype of the frozen base, bfloat16, and learn at 1e-5: the first factor never moves.

Mechanism: A is of the order 0.1, updates are lr; B starts from zero and hides it, since it does move.
Source: https://github.com/verl-project/verl-omni/pull/73
Expected: stagnation.
"""

import torch
from torch import nn

ID = "adapters_in_bfloat16"
EXPECTED = {"check": "stagnation"}


class Lora(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.base = nn.Linear(32, 32).bfloat16().requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, 32).to(dtype))
        self.b = nn.Parameter(torch.zeros(32, 4, dtype=dtype))

    def forward(self, x):
        return self.base(x).float() + (x.to(self.a.dtype) @ self.a.T @ self.b.T).float()


def _make(dtype):
    torch.manual_seed(0)
    model = Lora(dtype)
    optimizer = torch.optim.AdamW([model.a, model.b], lr=1e-5, weight_decay=0.0)
    x = torch.randn(16, 32).bfloat16()

    def step(i):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
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
    wb, wf = b["model"].a.clone(), f["model"].a.clone()
    for i in range(30):
        b["step"](i)
        f["step"](i)
    assert (b["model"].a == wb).float().mean() > 0.9
    assert (f["model"].a != wf).float().mean() > 0.9
