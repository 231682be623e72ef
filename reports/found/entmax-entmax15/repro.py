import sys

import torch
from entmax import entmax15

torch.manual_seed(0)
head, states = torch.nn.Linear(64, 32000), torch.randn(16, 64)  # over a vocabulary, PyTorch's own initial weights
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    logits = head(states)
    low = entmax15(logits, dim=-1).double().sum(-1)
wide = entmax15(logits.double(), dim=-1).sum(-1)  # of the same rounded logits
print(f"autocast bfloat16 gives rows that sum to {low.min():.3f} to {low.max():.3f}")
print(f"float64 gives {wide.min():.3f} to {wide.max():.3f}")
sys.exit(int((low - 1).abs().max() > 0.05))
