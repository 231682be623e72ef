import sys

import torch

torch.manual_seed(0)
image = torch.rand(1, 3, 64, 64)
with torch.autocast("cpu", torch.bfloat16):
    features = torch.nn.functional.conv2d(image, torch.eye(3)[:, :, None, None])
    low = features.histc(bins=4, min=0, max=1)
wide = features.double().histc(bins=4, min=0, max=1)
print("autocast bfloat16 gives", low.tolist(), "float64 gives", wide.tolist())
sys.exit(int(((low - wide) / wide).abs().max() > 0.1))
