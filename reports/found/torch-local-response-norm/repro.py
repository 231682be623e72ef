import sys

import torch
from torch import nn

torch.manual_seed(0)
conv, norm = nn.Conv2d(3, 16, 3), nn.LocalResponseNorm(5)
image = torch.randint(0, 256, (2, 3, 16, 16)).float() * 10  # activations of Caffe's weights on 0..255 pass 256 too
with torch.autocast("cpu", torch.float16):
    low = norm(conv(image))
wide = norm.double()(conv.double()(image.double()))
lost = int((low == 0).sum() - (wide == 0).sum())
print(f"autocast float16 gives {lost} zeros of {low.numel()}, largest {low.max():.4g}")
print(f"float64 gives none, largest {wide.max():.4g}")
sys.exit(int(lost > 0))
