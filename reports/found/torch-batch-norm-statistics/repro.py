import sys

import torch
from torch import nn


def trained(dtype: torch.dtype) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=0.01).to(dtype)  # the momentum of MobileNetV3
    for _ in range(300):
        norm((torch.randn(8, 4, 8, 8) * 3 + 10).to(dtype))
    return norm


low, wide = trained(torch.bfloat16), trained(torch.float64)
print("bfloat16 weights give mean", low.running_mean.tolist(), "variance", low.running_var.tolist())
print("float64 gives mean", wide.running_mean.tolist(), "variance", wide.running_var.tolist())
sys.exit(int((low.running_var.double() / wide.running_var - 1).abs().max() > 0.1))
