import sys

import torch
from x_transformers.x_transformers import RotaryEmbedding

rotary = RotaryEmbedding(32)
with torch.no_grad():
    wide, _ = rotary.double().forward_from_seq_len(2048)
    low, _ = RotaryEmbedding(32).bfloat16().forward_from_seq_len(2048)
error = (low.double() - wide).abs()
print("bfloat16 weights give angles", [round(a, 2) for a in low[0, -4:, 0].tolist()], f"off by {error.max():.1f} rad")
print("float64 gives", [round(a, 2) for a in wide[0, -4:, 0].tolist()])
sys.exit(int(error.max() > 0.1))
