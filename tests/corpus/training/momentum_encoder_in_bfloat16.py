"""The key encoder of a contrastive pair follows by 0.1 % a step and is bfloat16: it stays where it began.

Mechanism: k.data = k.data * 0.999 + q.data * 0.001 rounds back to k.
Source: no single report; written from the mechanism.
Expected: stagnation.
"""

import copy

import torch
from torch import nn

ID = "momentum_encoder_in_bfloat16"
EXPECTED = {"check": "stagnation"}


def _make(dtype):
    torch.manual_seed(0)
    query = nn.Linear(16, 8)
    key = copy.deepcopy(query).to(dtype).requires_grad_(False)
    optimizer = torch.optim.SGD(query.parameters(), lr=1e-2)
    x = torch.randn(32, 16)

    class Trainer:
        def __init__(self):
            self.query, self.key = query, key

        def step(self, i):
            optimizer.zero_grad()
            with torch.no_grad():
                for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    k.data = k.data * 0.999 + q.data.to(dtype) * 0.001
                target = nn.functional.normalize(self.key(x.to(dtype)).float(), dim=1)
            loss = nn.functional.cross_entropy(
                nn.functional.normalize(self.query(x), dim=1) @ target.T / 0.2, torch.arange(32)
            )
            loss.backward()
            optimizer.step()
            return loss.item()

    trainer = Trainer()
    return {"model": query, "optimizer": optimizer, "scaler": None, "step": trainer.step, "trainer": trainer}


def buggy():
    return _make(torch.bfloat16)


def fixed():
    return _make(torch.float32)


def manifests():
    b, f = buggy(), fixed()
    for i in range(300):
        b["step"](i)
        f["step"](i)

    def gap(c):
        return (c["trainer"].key.weight.float() - c["trainer"].query.weight).norm().item()

    assert gap(b) > 1.15 * gap(f), (gap(b), gap(f))
