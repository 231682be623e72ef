import sys

import torch
from rotary_embedding_torch import RotaryEmbedding

torch.manual_seed(0)
q, k = torch.randn(1, 1, 1, 32).expand(2, 1, 2048, 32).unbind(0)  # the same token at each of 2,048 positions
linear = torch.nn.Linear(32, 32, bias=False)
torch.nn.init.eye_(linear.weight)


def scores(rotary: RotaryEmbedding, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    q, k = (rotary.rotate_queries_or_keys(linear(t)[None]).double() for t in (q, k))
    return (q[..., -1:, :] @ k.mT).flatten()[-8:]  # of the last token with its eight neighbours


with torch.autocast("cpu", torch.bfloat16):
    low = scores(RotaryEmbedding(32), q, k)
linear.double()
wide = scores(RotaryEmbedding(32).double(), q.double(), k.double())
print("autocast bfloat16 gives", [round(s, 2) for s in low.tolist()])
print("float64 gives", [round(s, 2) for s in wide.tolist()])
sys.exit(int((low - wide).abs().max() > 0.1 * wide.abs().max()))
