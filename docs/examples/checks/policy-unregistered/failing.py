"""A custom op has no autocast kernel: it gets bfloat16 from the linear layer beside its own float32 argument.

Run: ampcheck audit failing.py:subject --dtype bfloat16 --fast
"""

import torch
from torch import nn


@torch.library.custom_op("docs_example::blend", mutates_args=())
def blend(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.to(weight.dtype) * weight


blend.register_autograd(
    lambda ctx, g: (g * ctx.weight, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "weight", inputs[1])
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("weight", torch.full((8,), 0.5))

    def forward(self, x):
        return blend(self.linear(x), self.weight)


def subject():
    torch.manual_seed(0)
    return Model(), (torch.randn(4, 8),)
