"""A threshold at a quantile of nearly equal entropies: which token stands there is a matter of rounding."""

import torch
from torch import nn

ID = "healthy_near_ties_sorted"
RUNS = ("native",)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 10)

    def forward(self, x):
        log_p = self.head(x).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return entropy - torch.quantile(entropy.float(), 0.8)


def healthy():
    model = Model().bfloat16()
    torch.manual_seed(1)
    return model, (torch.randn(20, 4).bfloat16(),)
