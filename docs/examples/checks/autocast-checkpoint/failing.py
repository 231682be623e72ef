"""A checkpoint written by hand recomputes the forward in backward, where autocast is off.

Run: ampcheck audit failing.py:subject
"""

import torch
from torch import nn


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.x, ctx.module = x.detach().requires_grad_(), module
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            output = ctx.module(ctx.x)
        output.backward(gradient.to(output.dtype))
        return ctx.x.grad, None


def subject():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = Checkpoint.apply(x, model).float().square().mean()
        loss.backward()

    return step
