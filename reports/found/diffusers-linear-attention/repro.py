import sys

import torch
from diffusers.models.attention_processor import SanaMultiscaleLinearAttention

torch.manual_seed(0)
attention = SanaMultiscaleLinearAttention(64, 64, attention_head_dim=32).eval()  # of AutoencoderDC
x = torch.randn(1, 64, 64, 64) * 8
with torch.no_grad():
    with torch.autocast("cpu", torch.float16):
        low = attention(x)
    wide = attention.double()(x.double())
print(f"autocast float16 gives {int((~low.isfinite()).sum())} of {low.numel()} not finite")
print(f"float64 gives numbers up to {wide.abs().max():.3g}")
sys.exit(int(not low.isfinite().all()))
