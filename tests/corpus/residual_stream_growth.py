"""The residual stream of a stack trained in bfloat16 grows past float16 in one of its later layers.

Mechanism: every layer adds a few times what came before; each is harmless alone and the sum passes 65504.
Source: https://github.com/huggingface/diffusers/issues/9096
Expected: overflow at `layers.5`, in the residual addition.
"""

import torch
from torch import nn

ID = "residual_stream_growth"
RUN = "native"
EXPECTED = {"check": "overflow", "module": "layers.5", "op": "aten::add.Tensor"}


class Layer(nn.Module):
    def __init__(self, dim, gain):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(torch.eye(dim).repeat(2, 1))
            self.down.weight.copy_(gain * torch.eye(dim).repeat(1, 2))

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    def __init__(self, depth=8, dim=16):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, 7 * 4**i) for i in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(dtype):
    x = torch.zeros(1, 3, 16)
    x[..., 0], x[..., 1:5] = 2.0, 0.5
    return (x.to(dtype),)


def buggy():
    return Stack().half(), inputs(torch.float16)


def fixed():
    return Stack().bfloat16(), inputs(torch.bfloat16)


def manifests():
    stack, args = buggy()
    broken = []
    for number, layer in enumerate(stack.layers):
        layer.down.register_forward_hook(
            lambda module, given, out, n=number: None if out.isfinite().all() else broken.append(f"{n}.down")
        )
        layer.register_forward_hook(
            lambda module, given, out, n=number: None if out.isfinite().all() else broken.append(f"{n}")
        )
    stack(*args)
    assert broken[0] == "5"
    whole, same = fixed()
    assert whole(*same).isfinite().all()
