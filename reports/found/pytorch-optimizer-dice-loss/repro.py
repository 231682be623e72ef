import sys

import torch
from pytorch_optimizer.loss.dice import DiceLoss
from pytorch_optimizer.loss.jaccard import JaccardLoss

torch.manual_seed(0)
head, features = torch.nn.Conv2d(4, 1, 1), torch.randn(2, 4, 320, 320)
target = (torch.rand(2, 1, 320, 320) < 0.7).float()  # a mask of most of each picture
torch.nn.init.constant_(head.bias, 2.0)
losses = DiceLoss("binary"), JaccardLoss("binary")
with torch.no_grad():
    with torch.autocast("cpu", torch.float16):
        out = head(features)
        low = [loss(out, target).item() for loss in losses]
    out = head.double()(features.double())
    wide = [loss(out, target.double()).item() for loss in losses]
print("autocast float16 gives", low, "float64 gives", wide)
sys.exit(int(not all(abs(a - b) < 0.05 for a, b in zip(low, wide, strict=True))))
