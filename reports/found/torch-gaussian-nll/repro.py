import sys

import torch
from torch import nn

torch.manual_seed(0)
linear = nn.Linear(8, 1)
nn.init.constant_(linear.bias, 400.0)  # a regression of house prices in thousands, of pixels, of milliseconds
x, target, var = torch.randn(64, 8), torch.randn(64, 1) * 100 + 100, torch.full((64, 1), 1e4)
loss = nn.GaussianNLLLoss()
with torch.autocast("cpu", torch.float16):
    out = linear(x)
    low = loss(out, target.to(out.dtype), var.to(out.dtype)).item()
wide = loss(linear.double()(x.double()), target.double(), var.double()).item()
print("autocast float16 gives", low, "float64 gives", wide)
sys.exit(int(abs(low - wide) > 0.05 * wide))
