import sys

import torch

torch.manual_seed(0)
image = torch.rand(3, 512, 512)
with torch.autocast("cpu", torch.float16):
    features = torch.nn.functional.conv2d(image, torch.eye(3)[:, :, None, None])
    low, mean = features.nanmean((1, 2)), features.mean((1, 2))
wide = image.double().nanmean((1, 2))
print("autocast float16 gives nanmean", low.tolist(), "mean", mean.tolist())
print("float64 gives", wide.tolist())
sys.exit(int(not low.isfinite().all()))
