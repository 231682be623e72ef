import sys

import torch
from torch import nn

torch.manual_seed(0)
head = nn.AdaptiveLogSoftmaxWithLoss(32, 1000, cutoffs=[100, 500])
x, target = torch.randn(64, 32), torch.randint(0, 1000, (64,))
wide = nn.AdaptiveLogSoftmaxWithLoss.forward(head.double(), x.double(), target).loss.item()
head.float()
try:
    with torch.autocast("cpu", torch.bfloat16):
        low = head(x, target).loss.item()
except RuntimeError as error:
    print("autocast bfloat16 gives", error)
    print("float64 gives", wide)
    sys.exit(1)
print("autocast bfloat16 gives", low, "float64 gives", wide)
