import sys

import torch
from local_attention.rotary import SinusoidalEmbeddings

x = torch.zeros(1, 2048, 32)
wide, _ = SinusoidalEmbeddings(32).double()(x)
low, _ = SinusoidalEmbeddings(32).bfloat16()(x)
error = (low.double() - wide).abs()
print("bfloat16 weights give angles", [round(a, 2) for a in low[-4:, 0].tolist()], f"off by {error.max():.1f} rad")
print("float64 gives", [round(a, 2) for a in wide[-4:, 0].tolist()])
sys.exit(int(error.max() > 0.1))
