import sys

import torch

torch.manual_seed(0)
x = torch.randn(16, 16384) * 3  # float32: 16 features of 16,384 samples
with torch.autocast("cpu", torch.float16):
    low, correlation = torch.cov(x), torch.corrcoef(x)
wide = torch.cov(x.double())
print("autocast float16 gives variances", low.diagonal()[:3].tolist(), "correlations", correlation[0, :3].tolist())
print("float64 gives variances", wide.diagonal()[:3].tolist())
sys.exit(int(not low.isfinite().all()))
