import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(dtype: torch.dtype) -> list[float]:
    model = nn.Linear(2, 2, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    means = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    for mean in means:
        mean.update_parameters(model)
        mean.n_averaged.fill_(400)  # updates at this weight so far
    nn.init.constant_(model.weight, 2.0)  # training moves a weight
    for mean in means * 160:
        mean.update_parameters(model)
    return [mean.module.weight.mean().item() for mean in means]


low, wide = averaged(torch.bfloat16), averaged(torch.float64)
print("bfloat16 weights give SWA, EMA", low, "float64 gives", wide)
sys.exit(int(max(abs(a - b) for a, b in zip(low, wide, strict=True)) > 0.1))
