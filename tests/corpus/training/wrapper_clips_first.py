"""A scaler in a wrapper, as timm has it, clips what is still scaled.

Mechanism: the callable clips the parameters before its inner GradScaler unscales.
Source: https://github.com/NCAR/miles-credit/pull/141
Expected: scaler-protocol.
"""

import torch
from torch import nn

ID = "wrapper_clips_first"
EXPECTED = {"check": "scaler-protocol"}


class NativeScaler:
    def __init__(self, unscale):
        self._scaler, self.unscale = torch.amp.GradScaler("cpu", init_scale=1024.0), unscale

    def __call__(self, loss, optimizer, parameters):
        self._scaler.scale(loss).backward()
        if self.unscale:
            self._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(parameters, 0.1)
        self._scaler.step(optimizer)
        self._scaler.update()


class Trainer:
    def __init__(self, unscale):
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss_scaler = NativeScaler(unscale)
        self.x = torch.randn(16, 8)

    def train_step(self, i):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (self.model(self.x).float() - 1).square().mean()
        self.loss_scaler(loss, self.optimizer, list(self.model.parameters()))
        return loss.item()


def _make(unscale):
    t = Trainer(unscale)
    return {"model": t.model, "optimizer": t.optimizer, "step": t.train_step, "trainer": t}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    b["step"](0)
    f["step"](0)
    assert b["model"].weight.grad.abs().max() < 1e-3 < f["model"].weight.grad.abs().max()
