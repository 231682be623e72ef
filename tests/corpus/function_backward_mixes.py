"""The backward of a hand-written autograd function meets a float32 weight with a bfloat16 gradient.

Mechanism: the function runs under autocast, its backward does not, and the saved weight is float32.
Source: https://github.com/idiap/fast-transformers/issues/32
Expected: low-precision-error in backward at `project`.
"""

import pytest
import torch
from torch import nn

ID = "function_backward_mixes"
RUN = "autocast:bfloat16"
EXPECTED = {"check": "low-precision-error", "module": "project"}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, wide):
        ctx.save_for_backward(x, weight)
        ctx.wide = wide
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if ctx.wide:
            grad = grad.to(weight.dtype)
        return grad @ weight, grad.mT @ x.to(grad.dtype), None


class Project(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.weight = wide, nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return Product.apply(x, self.weight, self.wide)


class Model(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.project = nn.Linear(8, 8), Project(wide)

    def forward(self, x):
        return self.project(self.encode(x).float())


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 8),)


def buggy():
    return Model(), inputs()


def fixed():
    return Model(wide=True), inputs()


def manifests():
    (broken, args), (whole, _) = buggy(), fixed()
    broken(*args).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        out, kept = broken(*args), whole(*args)
    kept.float().sum().backward()
    with pytest.raises(RuntimeError, match="dtype"):
        out.float().sum().backward()
