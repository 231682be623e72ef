import copy
import sys

import torch
from local_attention import LocalAttention

torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 2048, 64).bfloat16() for _ in range(3))
attention = LocalAttention(512, dim=64, causal=True)
wide = copy.deepcopy(attention).double()(q.double(), k.double(), v.double())  # of the same rounded q, k and v
with torch.autocast("cpu", torch.bfloat16):  # without autocast it raises: float32 and bfloat16 in one einsum
    kept = attention(q, k, v).double()
    low = copy.deepcopy(attention).bfloat16()(q, k, v).double()
error, other = (low - wide).norm() / wide.norm(), (kept - wide).norm() / wide.norm()
print(f"bfloat16 weights give an error of {error:.3f}, with inv_freq in float32 it is {other:.3f}")
sys.exit(int(error > 0.1))
