import sys

import torch

torch.manual_seed(0)
linear, lengths = torch.nn.Linear(4, 4), torch.tensor([1000, 3000])
torch.nn.init.ones_(linear.bias)
with torch.autocast("cpu", torch.bfloat16):
    nodes = linear(torch.rand(4000, 4) / 10)  # of two graphs
    low = torch.segment_reduce(nodes, "sum", lengths=lengths)
wide = torch.segment_reduce(nodes.double(), "sum", lengths=lengths)
print("autocast bfloat16 gives", low[1].tolist())
print("float64 gives", wide[1].tolist())
sys.exit(int(((low - wide) / wide).abs().max() > 0.1))
