import sys

import torch
from ema_pytorch import EMA


def followed(dtype: torch.dtype) -> float:
    model = torch.nn.Linear(2, 2, bias=False).to(dtype)
    torch.nn.init.ones_(model.weight)
    ema = EMA(model, beta=0.999, min_value=0.999, update_every=1, update_after_step=0)
    for step in range(400):
        torch.nn.init.constant_(model.weight, 1.0 if step < 10 else 2.0)  # training moves a weight
        ema.update()
    return ema.ema_model.weight.mean().item()


low, wide = followed(torch.bfloat16), followed(torch.float64)
print("bfloat16 weights give", low, "float64 gives", wide)
sys.exit(int(abs(low - wide) > 0.1))
