import sys

import torch

torch.manual_seed(0)
linear, nodes = torch.nn.Linear(8, 1), torch.rand(4096, 8)
torch.nn.init.ones_(linear.bias)
graph = torch.arange(4096) // 2048  # two graphs of 2,048 nodes each
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    energy = linear(nodes)[:, 0]
    low = torch.zeros(2, dtype=energy.dtype).index_add(0, graph, energy)
    scatter = torch.zeros(2, dtype=energy.dtype).scatter_add(0, graph, energy)
wide = torch.zeros(2, dtype=torch.double).index_add(0, graph, energy.double())
print("autocast bfloat16 gives index_add", low.tolist(), "scatter_add", scatter.tolist())
print("float64 gives", wide.tolist())
sys.exit(int(((low - wide) / wide).abs().max() > 0.1))
