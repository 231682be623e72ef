import sys

import torch
from diffusers.training_utils import EMAModel


def followed(dtype: torch.dtype) -> float:
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    ema = EMAModel([weight])  # defaults: the decay grows to 0.9999
    for step in range(1200):
        torch.nn.init.constant_(weight, 1.0 if step < 600 else 1.25)  # training moves a weight
        ema.step([weight])
    return float(ema.shadow_params[0].mean())


low, wide = followed(torch.bfloat16), followed(torch.float64)
print("bfloat16 weights give", low, "float64 gives", wide)
sys.exit(int(abs(low - wide) > 0.1))
