import sys

import torch
import torch.nn.functional as F

identity = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
image = (torch.arange(512) % 2).float().expand(1, 1, 512, 512)  # one pixel black, one white
with torch.autocast("cpu", torch.bfloat16):
    grid = F.affine_grid(identity, image.shape, align_corners=False)
    low = F.grid_sample(image, grid.float(), align_corners=False)
grid64 = F.affine_grid(identity.double(), image.shape, align_corners=False)
wide = F.grid_sample(image.double(), grid64, align_corners=False)
error = (low - wide).abs()
print(f"autocast bfloat16 gives {len(grid[0, 0, :, 0].unique())} columns, pixels off by up to {error.max():.2f}")
print(f"float64 gives {len(grid64[0, 0, :, 0].unique())} columns and the image itself")
sys.exit(int(error.max() > 0.1))
