"""custom_fwd and custom_bwd restore the state of the forward."""

import torch
from torch import nn


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight).float()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
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
