import sys

import torch
from linear_attention_transformer.linear_attention_transformer import SelfAttention

torch.manual_seed(0)
attention, x = SelfAttention(64, heads=4, causal=True).eval(), torch.randn(1, 2048, 64)
with torch.no_grad():
    attention.to_k.weight.mul_(4)  # keys of a standard deviation of 2.3, the largest 11.6
    with torch.autocast("cpu", torch.float16):
        low = attention(x)
    wide = attention.double()(x.double())
print(f"autocast float16 gives {int((~low.isfinite()).sum())} of {low.numel()} not finite")
print(f"float64 gives numbers up to {wide.abs().max():.3g}")
sys.exit(int(not low.isfinite().all()))
