"""A setting of PyTorch keeps autocast out of the compiled backward."""

import torch
import torch._functorch.config
from torch import nn

torch._functorch.config.backward_pass_autocast = "off"


class Float32Island(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), self.weight)


def subject():
    torch.manual_seed(0)
    return Float32Island(), [(torch.randn(8, 32),)]
