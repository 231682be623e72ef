"""The checkpoint holds model and optimizer, not the scaler; a resumed run starts at 65536 and skips steps.

Mechanism: save() without scaler.state_dict().
Source: https://github.com/huggingface/accelerate/issues/4289
Expected: resume.
"""

import torch
from torch import nn

ID = "scaler_left_out_of_the_checkpoint"
EXPECTED = {"check": "resume"}


def _make(keep):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    x = 20 * torch.randn(64, 8)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def save():
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return kept | {"scaler": scaler.state_dict()} if keep else kept

    def load(kept):
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        if "scaler" in kept:
            scaler.load_state_dict(kept["scaler"])

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step, "save": save, "load": load}


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    made = buggy()
    assert "scaler" not in made["save"]()
    assert "scaler" in fixed()["save"]()
    for i in range(6):
        made["step"](i)
    assert made["scaler"].get_scale() < 2.0**20
