"""The backward of a torch.autograd.Function runs outside the region: its products are in float32, and those of its
forward in bfloat16.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight).float()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def subject():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8, requires_grad=True), nn.Parameter(torch.randn(8, 8))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = Product.apply(x, weight).float().square().mean()
        loss.backward()

    return step
