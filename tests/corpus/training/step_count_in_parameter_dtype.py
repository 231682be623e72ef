"""An optimizer keeps its step count in a tensor like the parameter: in bfloat16 it stops at 256.

Mechanism: state["step"] = torch.zeros((), dtype=p.dtype); the bias correction never ends.
Source: no single report; written from the mechanism.
Expected: stagnation.
"""

import torch
from torch import nn

ID = "step_count_in_parameter_dtype"
EXPECTED = {"check": "stagnation"}


class Adam(torch.optim.Optimizer):
    def __init__(self, params, wide, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.wide = wide

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32 if self.wide else p.dtype)
                    state["m"], state["v"] = (
                        torch.zeros_like(p, dtype=torch.float32),
                        torch.zeros_like(p, dtype=torch.float32),
                    )
                    state["master"] = p.float().clone()
                state["step"] += 1
                t = state["step"].float()
                g = p.grad.float()
                state["m"].lerp_(g, 0.1)
                state["v"].lerp_(g * g, 0.001)
                update = (state["m"] / (1 - 0.9**t)) / ((state["v"] / (1 - 0.999**t)).sqrt() + 1e-8)
                state["master"].add_(update, alpha=-group["lr"])
                p.copy_(state["master"])


def _make(wide):
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    optimizer = Adam(model.parameters(), wide)
    x = torch.randn(16, 8).bfloat16()

    def step(i):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    b, f = buggy(), fixed()
    for i in range(300):
        b["step"](i)
        f["step"](i)

    def s(c):
        return c["optimizer"].state[c["model"].weight]["step"].item()

    assert s(b) == 256
    assert s(f) == 300
