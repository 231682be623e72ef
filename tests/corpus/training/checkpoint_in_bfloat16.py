"""A checkpoint stores every floating tensor in bfloat16, the optimizer's step count and moments too.

Mechanism: the moments and the count of steps come back rounded, and the resumed run is another one.
Source: https://github.com/vllm-project/speculators/pull/899
Expected: resume.
"""

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

ID = "checkpoint_in_bfloat16"
EXPECTED = {"check": "resume"}


def _make(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(24)]

    def step(i):
        x, y = data[i % 24]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def save():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return {
            "model": weights,
            "optimizer": tree_map_only(torch.Tensor, lambda t: t.to(dtype), optimizer.state_dict()),
        }

    def load(kept):
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step, "save": save, "load": load}


def buggy():
    return _make(torch.bfloat16)


def fixed():
    return _make(torch.float32)


def manifests():
    away = []
    for make in (buggy, fixed):
        whole, resumed = make(), make()
        for i in range(20):
            whole["step"](i)
            if i == 10:
                resumed["load"](resumed["save"]())
            resumed["step"](i)
        pairs = zip(whole["model"].parameters(), resumed["model"].parameters(), strict=True)
        away.append(max((a - b).abs().max().item() for a, b in pairs))
    assert away[0] > 1e-6, away
    assert away[1] == 0, away
