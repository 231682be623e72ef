import sys

import torch
import torch.nn.functional as F

torch.manual_seed(0)
linear = torch.nn.Linear(16, 16, bias=False)
a, b = torch.randn(4, 16), torch.randn(4, 16)
a[2] = 0  # a padded token
with torch.autocast("cpu", torch.float16):
    low = F.cosine_similarity(linear(a), linear(b))
linear.double()
wide = F.cosine_similarity(linear(a.double()), linear(b.double()))
print("autocast float16 gives", low.tolist())
print("float64 gives", wide.tolist())
sys.exit(int(not low.isfinite().all()))
