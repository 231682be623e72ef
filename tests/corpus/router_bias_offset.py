"""A selection bias near 7, of which a quarter tells experts apart, is cast to bfloat16 before top-k.

Mechanism: the spacing at 7 is 1/32, so that biases of 256 experts tie, and other experts are chosen.
Source: https://github.com/sgl-project/sglang/pull/37133 (and sgl-project/sglang#31213)
Expected: precision-loss in the gate.
"""

import torch
from torch import nn
from torch.nn import functional as F

ID = "router_bias_offset"
RUN = "native"
EXPECTED = {"check": "precision-loss", "module": ""}


class Gate(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.weight = nn.Parameter(torch.randn(256, 32) * 0.02)
        self.experts = nn.Parameter(torch.randn(256, 16))

    def forward(self, x, bias):
        if self.wide:
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        else:
            scores = F.linear(x, self.weight).sigmoid()
            bias = bias.to(scores.dtype)
        chosen = (scores + bias).topk(8, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return (weights.unsqueeze(-1) * self.experts[chosen]).sum(1)


def _make(wide):
    torch.manual_seed(0)
    gate = Gate(wide).bfloat16()
    bias = 6.82 + 0.24 * torch.rand(256)
    return gate, (torch.randn(128, 32).bfloat16(), bias)


def buggy():
    return _make(False)


def fixed():
    return _make(True)


def manifests():
    gate, (x, bias) = _make(False)

    def chosen(scores):
        return scores.topk(8, -1).indices.sort(-1).values

    exact = chosen((x.double() @ gate.weight.double().T).sigmoid() + bias.double())
    low = F.linear(x, gate.weight).sigmoid() + bias.bfloat16()
    wide = F.linear(x.float(), gate.weight.float()).sigmoid() + bias
    bad, good = ((chosen(scores) != exact).any(-1).float().mean().item() for scores in (low, wide))
    assert bad > 0.3, bad
    assert good < 0.05, good
