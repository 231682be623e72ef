"""An optimizer keeps its moments in float32 beside bfloat16 weights; load_state_dict casts them to bfloat16.

Mechanism: Optimizer.load_state_dict casts floating state to the dtype of the parameter.
Source: https://github.com/pytorch/pytorch/issues/43706
Expected: resume.
"""

import torch
from torch import nn

ID = "state_cast_on_load"
EXPECTED = {"check": "resume"}


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"], state["master"] = torch.zeros_like(p, dtype=torch.float32), p.float().clone()
                state["momentum"].mul_(0.9).add_(p.grad.float())
                state["master"].add_(state["momentum"], alpha=-group["lr"])
                p.copy_(state["master"])


class Kept(Momentum):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for number, p in enumerate(self.param_groups[0]["params"]):
            self.state[p].update({k: v.clone() for k, v in state_dict["state"][number].items()})


def _make(kind):
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    optimizer = kind(model.parameters())
    x = torch.randn(16, 8).bfloat16()

    def step(i):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def save():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(kept):
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step, "save": save, "load": load}


def buggy():
    return _make(Momentum)


def fixed():
    return _make(Kept)


def manifests():
    for made, dtype in ((buggy(), torch.bfloat16), (fixed(), torch.float32)):
        made["step"](0)
        made["load"](made["save"]())
        assert made["optimizer"].state[made["model"].weight]["master"].dtype is dtype
