"""Its state is saved and loaded."""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), 20 * torch.randn(64, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    saved = {"model": model, "optimizer": optimizer, "scaler": scaler}

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def save():
        return {name: part.state_dict() for name, part in saved.items()}

    def load(checkpoint):
        for name, part in saved.items():
            part.load_state_dict(checkpoint[name])

    return {"model": model, "optimizer": optimizer, "scaler": scaler, "step": step, "save": save, "load": load}
