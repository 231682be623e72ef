import sys

import torch
from torch import nn


def gradient(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(100, 8, sparse=True).to(dtype), nn.Linear(8, 1).to(dtype)
    tokens = torch.randint(0, 100, (16, 512)) * (torch.rand(16, 512) < 0.5)  # half of them are padding
    head(embedding(tokens)).sum().backward()
    return embedding.weight.grad.coalesce().to_dense()[0].double()


low, wide = gradient(torch.bfloat16), gradient(torch.float64)
print("bfloat16 weights give", low[:4].tolist())
print("float64 gives", wide[:4].tolist())
sys.exit(int(((low - wide) / wide).abs().max() > 0.1))
