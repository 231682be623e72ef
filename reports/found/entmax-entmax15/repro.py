import sys

import torch
from entmax import entmax15

torch.manual_seed(0)
head, states = torch.nn.Linear(64, 32000), torch.randn(4, 64)  # over a vocabulary, at the start of a training
torch.nn.init.normal_(head.weight, std=0.006)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    logits = head(states)
    low = entmax15(logits, dim=-1)
wide = entmax15(logits.double(), dim=-1)  # of the same rounded logits
print("autocast bfloat16 gives rows that sum to", low.double().sum(-1).tolist())
print("float64 gives", wide.sum(-1).tolist())
sys.exit(int((low.double().sum(-1) - 1).abs().max() > 0.05))
