import sys

import torch
from torch_ema import ExponentialMovingAverage


def followed(dtype: torch.dtype) -> float:
    model = torch.nn.Linear(2, 2, bias=False).to(dtype)
    torch.nn.init.ones_(model.weight)
    ema = ExponentialMovingAverage(model.parameters(), decay=0.999, use_num_updates=False)
    torch.nn.init.constant_(model.weight, 2.0)  # training moves a weight
    for _ in range(400):
        ema.update()
    return ema.shadow_params[0].mean().item()


low, wide = followed(torch.bfloat16), followed(torch.float64)
print("bfloat16 weights give", low, "float64 gives", wide)
sys.exit(int(abs(low - wide) > 0.1))
