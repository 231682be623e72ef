import sys

import torch
from pytorch_optimizer.loss.jaccard import JaccardLoss

torch.manual_seed(0)
head, features = torch.nn.Conv2d(4, 1, 1), torch.randn(2, 4, 320, 320)
target = (torch.rand(2, 1, 320, 320) < 0.7).float()  # a mask of most of each picture
torch.nn.init.constant_(head.bias, 2.0)
loss = JaccardLoss("binary")
with torch.no_grad():
    with torch.autocast("cpu", torch.float16):
        out = head(features)
        low = loss(out, target.to(out.dtype)).item()
    wide = loss(head.double()(features.double()), target.double()).item()
print("autocast float16 gives", low, "float64 gives", wide)
sys.exit(int(not abs(low - wide) < 0.05))
