import sys

import torch
from ema_pytorch import EMA


def followed(dtype: torch.dtype) -> float:
    model = torch.nn.Linear(2, 2, bias=False).to(dtype)
    torch.nn.init.ones_(model.weight)
    ema = EMA(model)  # defaults: beta grows to 0.9999, an update every 10 steps
    for step in range(2000):
        torch.nn.init.constant_(model.weight, 1.0 if step < 1000 else 1.25)  # training moves a weight
        ema.update()
    return ema.ema_model.weight.mean().item()


low, wide = followed(torch.bfloat16), followed(torch.float64)
print("bfloat16 weights give", low, "float64 gives", wide)
sys.exit(int(abs(low - wide) > 0.05))
