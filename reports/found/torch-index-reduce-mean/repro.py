import sys

import torch

torch.manual_seed(0)
linear, nodes = torch.nn.Linear(8, 4), torch.rand(4096, 8)
torch.nn.init.ones_(linear.bias)
graph = torch.arange(4096) // 2048  # two graphs of 2,048 nodes each
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    features = linear(nodes).mT.contiguous()
    low = torch.zeros(4, 2, dtype=features.dtype).index_reduce(1, graph, features, "mean", include_self=False)
wide = torch.zeros(4, 2).double().index_reduce(1, graph, features.double(), "mean", include_self=False)
print("autocast bfloat16 gives", low[0].tolist(), "float64 gives", wide[0].tolist())
sys.exit(int(((low - wide) / wide).abs().max() > 0.1))
