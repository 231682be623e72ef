import sys

import torch
from torch import nn


def gradient(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(2, 8).to(dtype), nn.Linear(8, 1).to(dtype)  # token types: nearly all are 0
    types = torch.zeros(16, 512, dtype=torch.long)
    head(embedding(types)).sum().backward()
    return embedding.weight.grad[0].double()


low, wide = gradient(torch.bfloat16), gradient(torch.float64)
print("bfloat16 weights give", low[:4].tolist())
print("float64 gives", wide[:4].tolist())
sys.exit(int(((low - wide) / wide).abs().max() > 0.1))
