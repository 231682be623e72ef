import sys

import torch
import torch.nn.functional as F

torch.manual_seed(0)
linear = torch.nn.Linear(16, 16, bias=False)
tokens = torch.randn(4, 16)
tokens[2] = 0  # a padded token
with torch.autocast("cpu", torch.float16):
    low = F.normalize(linear(tokens))
wide = F.normalize(linear.double()(tokens.double()))
print("autocast float16 gives", low[2, :3].tolist(), "float64 gives", wide[2, :3].tolist())
sys.exit(int(not low.isfinite().all()))
