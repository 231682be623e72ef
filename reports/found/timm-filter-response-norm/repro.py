import sys

import torch
from timm.layers import FilterResponseNormTlu2d

torch.manual_seed(0)
conv, norm = torch.nn.Conv2d(3, 8, 3), FilterResponseNormTlu2d(8)
image = torch.randn(2, 3, 16, 16) * 3
torch.nn.init.normal_(conv.weight, std=30)
with torch.no_grad():
    with torch.autocast("cpu", torch.float16):
        low = norm(conv(image))
    wide = norm.double()(conv.double()(image.double()))
print(f"autocast float16 gives a largest value of {low.max():.3g}, {int((low == 0).sum())} zeros of {low.numel()}")
print(f"float64 gives {wide.max():.3g}, {int((wide == 0).sum())} zeros")
sys.exit(int((low - wide).abs().max() > 0.1 * wide.abs().max()))
