import sys

import torch
from x_transformers.x_transformers import DynamicPositionBias

torch.manual_seed(0)
bias = DynamicPositionBias(dim=64, heads=4, depth=2)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    low = bias(2048, 2048)[0, -1].double()  # of the last token with each token before
with torch.no_grad():
    wide = bias.float()(2048, 2048)[0, -1].double()  # its positions are float32
print(f"autocast bfloat16 gives {len(low[:1024].unique())} biases for the 1,024 farthest tokens")
print(f"float32 gives {len(wide[:1024].unique())}; the largest difference is {(low - wide).abs().max():.2f},")
print(f"neighbours differ by {wide[:1024].diff().abs().mean():.2g}")
sys.exit(int(len(low[:1024].unique()) < 300))
