"""bfloat16 has the range of float32."""

import torch
from torch import nn


def subject():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 64)), torch.randn(512, 8)
    nn.init.constant_(model[2].bias, -4.6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        p = logits.float().sigmoid()
        loss = (p**2 * -(1 - p).log()).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "scaler": None, "step": step}
