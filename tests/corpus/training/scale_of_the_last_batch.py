"""Delayed scaling takes the scale of a batch from the largest value of the batch before it.

Mechanism: batches of one source are four times as large as those of the other, and the clamp before the cast to
float8_e4m3fn cuts them off.
Source: https://github.com/NVIDIA/TransformerEngine/issues/1169
Expected: precision-loss at the clamp.
"""

import torch
from torch import nn

ID = "scale_of_the_last_batch"
EXPECTED = {"check": "precision-loss"}


class Delayed(nn.Module):
    def __init__(self, history):
        super().__init__()
        self.linear = nn.Linear(16, 32)
        self.register_buffer("amax", torch.ones(history))

    def forward(self, x):
        amax = self.amax.max()
        self.amax = torch.cat([self.amax[1:], x.detach().abs().amax().view(1)])
        codes = (x * (448 / amax)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return self.linear(codes.float() * (amax / 448))


def _loop(history):
    torch.manual_seed(0)
    model = nn.Sequential(Delayed(history), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes = iter([4.0, 1.0] * 1000)
    for _ in range(history):  # the first batches fill the history
        model(torch.randn(64, 16) * next(sizes))

    def step(_):
        x = torch.randn(64, 16) * next(sizes)
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step}


def buggy():
    return _loop(1)


def fixed():
    return _loop(16)


def manifests():
    x = torch.randn(64, 16)
    for history in (1, 16):
        layer = _loop(history)["model"][0]
        layer.linear = nn.Identity()
        layer(x)
        large = 4 * x
        error = (layer(large) - large).norm() / large.norm()
        assert bool(error > 0.3) is (history == 1), error
