import sys

import torch

torch.manual_seed(0)
memory, weight, slot = torch.rand(4, 8), torch.eye(8), torch.randint(0, 4, (8192,))  # read 2,048 times each


def gradient(dtype: torch.dtype) -> torch.Tensor:
    keys = (memory @ weight).to(dtype).requires_grad_()
    (keys[slot].float() * 0.5).sum().backward()
    return keys.grad.double()


with torch.autocast("cpu", torch.bfloat16):
    low = gradient((memory @ weight).dtype)
wide = gradient(torch.float64)
print("autocast bfloat16 gives", low[:, 0].tolist(), "float64 gives", wide[:, 0].tolist())
sys.exit(int(((low - wide) / wide).abs().max() > 0.1))
