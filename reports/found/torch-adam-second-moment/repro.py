import sys

import torch


def learned(dtype: torch.dtype) -> float:
    weight = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
    for step in range(300):
        weight.grad = torch.full_like(weight, 10.0 if step < 3 else 0.01)  # a few large gradients, as of a warm-up
        optimizer.step()
    return optimizer.state[weight]["exp_avg_sq"].mean().item()


low, wide = learned(torch.bfloat16), learned(torch.float64)
print("bfloat16 weights give a second moment of", low, "float64 gives", wide)
sys.exit(int(abs(low - wide) > 0.2 * wide))
