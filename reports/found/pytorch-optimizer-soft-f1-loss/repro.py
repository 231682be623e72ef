import sys

import torch
from pytorch_optimizer.loss.f1 import SoftF1Loss

torch.manual_seed(0)
head, features = torch.nn.Conv2d(4, 1, 1), torch.randn(2, 4, 320, 320)
target = (torch.rand(2, 1, 320, 320) < 0.7).long()  # an integer mask of most of each picture
torch.nn.init.constant_(head.bias, 2.0)
loss = SoftF1Loss()
with torch.no_grad():
    with torch.autocast("cpu", torch.float16):
        out = head(features).sigmoid()
        low = loss(out, target).item()
    wide = loss(head.double()(features.double()).sigmoid(), target).item()
print("autocast float16 gives", low, "float64 gives", wide)
sys.exit(int(not abs(low - wide) < 0.05))
