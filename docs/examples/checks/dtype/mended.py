"""The result is cast to the dtype of the input."""

import torch
from ampcheck import Subject
from torch import nn


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight.to(x.dtype)


def subject():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Scale())
    return Subject((model, (torch.randn(4, 8),)), dtypes={"1": torch.bfloat16})
